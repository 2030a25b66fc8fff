"""What a step takes beyond weights and cache, estimated before anything is loaded. No torch.

On a device these numbers stand only until the largest steps have been run and measured.
"""

from __future__ import annotations

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.parameters import stated
from glowplug.core.plan.budget.graphs import graph_line
from glowplug.core.plan.budget.layers import LayerBytes, StepTokens
from glowplug.core.plan.plan import BudgetLine
from glowplug.core.plan.proposal import Draft
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.offers import AttentionOffers, SamplerOffers

MIB = 1 << 20
CUDA_RUNTIME = 736 * MIB  #: CUDA context, code of the kernels, libraries' workspaces
RESERVED = "attention buffers"  #: name of the line of ``AttentionOffers.reserves``
HOST_COPIES = 3.0  #: float32 logits on a CPU, and what sampling makes of them
SCORED = 256  #: positions of a prompt whose logits are made at a time (``Runner._score``)
SCORED_COPIES = 2  #: logits and their log-probabilities


def workspace_lines(draft: Draft, rows: int, step_tokens: int, device: str) -> list[BudgetLine]:
    """Activations of the largest step, logits of every row, rotary tables, and what attention,
    sampling, the CUDA runtime and graphs take."""
    model = draft.facts.model
    lines = [_activation_line(draft, rows, step_tokens), _logit_line(draft, rows, device)]
    if model.kind == "mla" or model.head_dim:
        lines.append(_rope_tables(draft))
    if device == "cuda":
        lines += _attention_line(draft, rows)
        lines.append(
            BudgetLine(
                "sampling state",
                int(rows * model.vocab_size * _sampler(draft).state_bytes),
                f"penalties and allowed tokens of {rows} rows",
            )
        )
        lines.append(BudgetLine("cuda runtime", CUDA_RUNTIME, "context, kernels, libraries"))
        graphs = graph_line(draft, rows, step_tokens, LayerBytes(draft).claimed)
        lines += [graphs] if graphs is not None else []
    if draft.config.memory.reserve_bytes:
        lines.append(
            BudgetLine("reserve", draft.config.memory.reserve_bytes, "memory.reserve_bytes")
        )
    return lines


def _attention_line(draft: Draft, rows: int) -> list[BudgetLine]:
    """What attention reserves before the first step, for rows as long as they may be."""
    attention = draft.first("attention")
    values = draft.values
    model = draft.facts.model
    if (
        attention is None
        or not isinstance(attention.offers, AttentionOffers)
        or attention.offers.reserves is None
    ):
        return []
    context = draft.config.context_length or model.max_positions
    positions = context + values["width"] + values["lookahead"]
    heads = -(-model.num_heads // axis_size("attn_tp", values["mesh"]))
    size = attention.offers.reserves(
        DecodingRows(
            rows + 1,
            positions,
            values["page_size"],
            values["width"],
            heads,
            values["draft_layers"] > 0,
        )
    )
    return (
        [
            BudgetLine(
                RESERVED,
                size,
                f"page tables and workspace of {attention.name}, {rows} rows of {context} tokens",
            )
        ]
        if size
        else []
    )


def _sampler(draft: Draft) -> SamplerOffers:
    sampler = draft.first("sampling")
    return (
        sampler.offers
        if sampler is not None and isinstance(sampler.offers, SamplerOffers)
        else SamplerOffers()
    )


def _activation_line(draft: Draft, rows: int, step_tokens: int) -> BudgetLine:
    groups = draft.values["mesh"].get("dp", 1)
    gathered = step_tokens * groups
    how = f"a step of {step_tokens} tokens"
    if groups > 1:
        how += f", {gathered} of {groups} groups in the feed-forward layers"
    if draft.values["device"] == "cuda":
        size = LayerBytes(draft).activations(_largest_step(draft, rows, step_tokens, gathered))
    else:
        size = _on_host(draft, step_tokens, gathered)
    return BudgetLine("activations", size, how)


def _largest_step(draft: Draft, rows: int, step_tokens: int, gathered: int) -> StepTokens:
    """As ``warmup.most_tokens`` runs it: one row's chunk behind as long a cached one where the
    context allows it.
    """
    width = draft.values["width"]
    context = draft.config.context_length or draft.facts.model.max_positions
    longest = max(1, min(step_tokens - rows * width, context - width))
    return StepTokens(
        step_tokens, gathered, longest, max(0, min(longest, context - width - longest))
    )


def _even_step(draft: Draft, tokens: int) -> int:
    """A step of few tokens on every rank."""
    return LayerBytes(draft).activations(
        StepTokens(tokens, tokens * draft.values["mesh"].get("dp", 1), tokens)
    )


def _logit_line(draft: Draft, rows: int, device: str) -> BudgetLine:
    """Of every row in a step that samples with all that requests may ask for, or of a prompt that
    is scored.
    """
    model = draft.facts.model
    parts = axis_size("attn_tp", draft.values["mesh"])
    vocabulary = -(-model.vocab_size // parts) * parts
    count = rows * draft.values["width"]
    copies = HOST_COPIES
    size = int(count * vocabulary * 4 * copies)
    if device == "cuda":
        scratch = _sampler(draft).scratch_rows
        held = max(count + (scratch(count) if scratch else 0), SCORED_COPIES * SCORED)
        copies = held / count
        size = max(
            held * vocabulary * 4 + count * model.hidden_size * DTYPE_BYTES[draft.values["dtype"]],
            _even_step(draft, max(count, SCORED + 1)),
        )  # a prompt's first token is not scored
    return BudgetLine(
        "logits", size, f"{count} rows of {vocabulary} tokens, float32, {copies:.3g} copies"
    )


def _on_host(draft: Draft, own: int, gathered: int) -> int:
    """Bytes of a step: ``own`` tokens of this rank's group in attention, ``gathered`` of all in
    feed-forward layers.
    """
    model = draft.facts.model
    mesh = draft.values["mesh"]
    element = DTYPE_BYTES[draft.values["dtype"]]
    width = max(
        -(-stated(model, "intermediate_size") // axis_size("tp", mesh)),
        -(-stated(model, "moe_intermediate_size") // axis_size("moe_tp", mesh)),
        model.hidden_size,
    )
    heads = -(-model.num_heads // axis_size("attn_tp", mesh)) * (
        model.head_dim + stated(model, "v_head_dim")
    )
    numbers = own * (4 * model.hidden_size + 3 * heads) + gathered * (
        2 * model.hidden_size + 3 * width
    )
    return int(numbers * max(element, 4))


def _rope_tables(draft: Draft) -> BudgetLine:
    model = draft.facts.model
    tables = 1 + draft.values["draft_layers"]
    positions = draft.config.context_length or model.max_positions
    size = positions * (model.qk_rope_head_dim or model.head_dim) * 4 * tables
    return BudgetLine(
        "rotary tables", size, f"{positions} positions, float32" + (", twice" if tables > 1 else "")
    )
