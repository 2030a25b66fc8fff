"""What a step takes beyond weights and cache, estimated before anything is loaded. No torch.

On a device these numbers stand only until the largest steps have been run and measured; they are made from what those
steps were measured to take.
"""
from __future__ import annotations

from glowplug.core.draft import Draft
from glowplug.core.memory.graph_bytes import graph_line
from glowplug.core.memory.layout import DTYPE_BYTES
from glowplug.core.mesh import axis_size
from glowplug.core.offers import SamplerOffers
from glowplug.core.parameters import stated
from glowplug.core.plan import BudgetLine

MIB = 1 << 20
CUDA_RUNTIME = 736 * MIB  #: CUDA context, code of the kernels, libraries' workspaces
#: device -> float32 copies of the logits while a step samples with all that requests may ask for
LOGIT_COPIES = {"cpu": 3.0, "cuda": 10.75}


def workspace_lines(draft: Draft, rows: int, step_tokens: int, device: str) -> list[BudgetLine]:
    """Activations of the largest step, logits of every row, rotary tables, and what the CUDA runtime takes."""
    model, mesh = draft.facts.model, draft.values["mesh"]
    lines = [_activation_line(draft, step_tokens), _logit_line(draft, rows, device)]
    if model.kind == "mla" or model.head_dim:
        lines.append(_rope_tables(draft))
    if device == "cuda":
        lines.append(BudgetLine("sampling state", int(rows * model.vocab_size * _state_bytes(draft)),
                                f"penalties and allowed tokens of {rows} rows"))
        lines.append(BudgetLine("cuda runtime", CUDA_RUNTIME, "context, kernels, libraries"))
        graphs = graph_line(draft, rows, step_tokens,
                            lambda tokens: activations(draft, tokens, tokens * mesh.get("dp", 1)))
        lines += [graphs] if graphs is not None else []
    if draft.config.memory.reserve_bytes:
        lines.append(BudgetLine("reserve", draft.config.memory.reserve_bytes, "memory.reserve_bytes"))
    return lines


def _state_bytes(draft: Draft) -> float:
    sampler = draft.first("sampling")
    return sampler.offers.state_bytes if sampler is not None and isinstance(sampler.offers, SamplerOffers) else 0.0


def _activation_line(draft: Draft, step_tokens: int) -> BudgetLine:
    groups = draft.values["mesh"].get("dp", 1)
    gathered, how = step_tokens * groups, f"a step of {step_tokens} tokens"
    if groups > 1:
        how += f", {gathered} of {groups} groups in the feed-forward layers"
    return BudgetLine("activations", activations(draft, step_tokens, gathered), how)


def _logit_line(draft: Draft, rows: int, device: str) -> BudgetLine:
    parts = axis_size("attn_tp", draft.values["mesh"])
    vocabulary = -(-draft.facts.model.vocab_size // parts) * parts
    count, copies = rows * draft.values["width"], LOGIT_COPIES[device]
    return BudgetLine("logits", int(count * vocabulary * 4 * copies),
                      f"{count} rows of {vocabulary} tokens, float32, {copies:g} copies")


def activations(draft: Draft, own: int, gathered: int) -> int:
    """Bytes of a step: ``own`` tokens of this rank's group in attention, ``gathered`` of all in feed-forward layers."""
    if draft.values["device"] == "cuda":
        return max(_attention_on_device(draft, own), _feed_forward_on_device(draft, gathered))
    model, mesh, element = draft.facts.model, draft.values["mesh"], DTYPE_BYTES[draft.values["dtype"]]
    width = max(-(-stated(model, "intermediate_size") // axis_size("tp", mesh)),
                -(-stated(model, "moe_intermediate_size") // axis_size("moe_tp", mesh)), model.hidden_size)
    numbers = own * (4 * model.hidden_size + 3 * _head_numbers(draft)) + gathered * (2 * model.hidden_size + 3 * width)
    return int(numbers * max(element, 4))


def _attention_on_device(draft: Draft, tokens: int) -> int:
    """Queries, keys, values and outputs of every head, beside residual, input and output."""
    numbers = 2 * _head_numbers(draft) + 3 * draft.facts.model.hidden_size
    return int(tokens * numbers * DTYPE_BYTES[draft.values["dtype"]])


def _feed_forward_on_device(draft: Draft, tokens: int) -> int:
    """Gate, up and their product, or the inner and outer activations of every expert chosen, beside the same."""
    model, mesh = draft.facts.model, draft.values["mesh"]
    dense = 3 * -(-stated(model, "intermediate_size") // axis_size("tp", mesh))
    chosen = stated(model, "num_experts_per_tok") + stated(model, "n_shared_experts") if model.n_routed_experts else 0
    inner = -(-stated(model, "moe_intermediate_size") // axis_size("moe_tp", mesh))
    numbers = max(dense, chosen * (inner + model.hidden_size)) + 3 * model.hidden_size
    return int(tokens * numbers * DTYPE_BYTES[draft.values["dtype"]])


def _head_numbers(draft: Draft) -> int:
    """Numbers of a query (or key) and a value (or output) of all heads on this rank."""
    model, mesh = draft.facts.model, draft.values["mesh"]
    value = stated(model, "v_head_dim", model.head_dim if draft.values["device"] == "cuda" else 0)
    return int(-(-model.num_heads // axis_size("attn_tp", mesh)) * (model.head_dim + value))


def _rope_tables(draft: Draft) -> BudgetLine:
    model, tables = draft.facts.model, 1 + draft.values["draft_layers"]
    positions = draft.config.context_length or model.max_positions
    size = positions * (model.qk_rope_head_dim or model.head_dim) * 4 * tables
    return BudgetLine("rotary tables", size, f"{positions} positions, float32" + (", twice" if tables > 1 else ""))
