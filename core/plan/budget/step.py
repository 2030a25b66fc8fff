"""Estimated memory of a step beside weights and KV cache. No torch.

On a device, measurements replace these estimates after the largest steps have run.
"""

from __future__ import annotations

from functools import partial

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.budget.counts import Counts
from glowplug.core.plan.budget.graphs import graph_line, slice_rows
from glowplug.core.plan.budget.layers import LayerBytes, StepTokens, features_of
from glowplug.core.plan.budget.units import MIB
from glowplug.core.plan.plan import BudgetLine
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.byte_costs import DecodingRows, ExchangeSizes
from glowplug.core.plugin.component import Options
from glowplug.core.plugin.offers import SamplerOffers

CUDA_RUNTIME = 736 * MIB  #: bytes of the CUDA context, kernel code and libraries' workspaces
DRAFT_HEAD = "draft head"  #: name of the budget line for the draft's copy of rows of the head
RESERVED = "attention buffers"  #: name of the budget line for ``AttentionOffers.reserves``
RUNTIME_LINE = "cuda runtime"  #: name of a budget line
#: names of the lines whose memory torch's allocator does not see: it is measured with the runtime
EXCHANGE_BUFFERS = "exchange buffers"
EXCHANGE_LIBRARY = "exchange library"
DRAFT_STATE = "draft state"  #: name of the budget line for ``SpeculativeOffers.reserves``
HOST_COPIES = 3.0  #: memory of float32 logits and of sampling on a CPU, in copies of the logits
SCORED = 256  #: prompt positions whose logits are computed at a time (``Runner._score``)
SCORED_COPIES = 2  #: tensors of their size: logits and log-probabilities


def workspace_lines(proposal: Proposal, counts: Counts) -> list[BudgetLine]:
    """Return the budget lines for the memory of a step.

    The lines are: activations of the largest step, logits of all rows, rotary tables, and the
    memory of attention, sampling, CUDA runtime and graphs.
    """
    model = proposal.facts.model
    layers = LayerBytes(proposal)
    lines = [
        _activation_line(proposal, layers, counts),
        _logit_line(proposal, layers, counts.rows),
    ]
    if model.kind == "mla" or model.head_dim:
        lines.append(_rope_tables(proposal))
    lines += _draft_head_line(proposal)
    lines += _draft_state_line(proposal, counts.rows)
    if proposal.values.device == "cuda":
        lines += _device_lines(proposal, layers, counts)
    if proposal.config.memory.reserve_bytes:
        lines.append(
            BudgetLine("reserve", proposal.config.memory.reserve_bytes, "memory.reserve_bytes")
        )
    return lines


def _device_lines(proposal: Proposal, layers: LayerBytes, counts: Counts) -> list[BudgetLine]:
    """Return the budget lines that exist only on a GPU."""
    rows = counts.rows
    lines = _attention_line(proposal, rows)
    lines.append(
        BudgetLine(
            "sampling state",
            int(rows * proposal.facts.model.vocab_size * _sampler(proposal).state_bytes),
            f"penalties and allowed tokens of {rows} rows",
        )
    )
    lines.append(BudgetLine(RUNTIME_LINE, CUDA_RUNTIME, "context, kernels, libraries"))
    lines += _collective_lines(proposal, counts)
    graphs = graph_line(proposal, counts.captured, partial(layers.claimed, features_of(proposal)))
    return [*lines, graphs] if graphs is not None else lines


def _attention_line(proposal: Proposal, rows: int) -> list[BudgetLine]:
    """Return the budget line of the buffers that attention reserves; [] if it reserves none."""
    attention = proposal.attention
    if attention is None or attention.offers.reserves is None:
        return []
    size = attention.offers.reserves(_decoding_rows(proposal, rows))
    how = f"page tables and workspace of {attention.name}, {_rows_of_tokens(proposal, rows)}"
    return [BudgetLine(RESERVED, size, how)] if size else []


def _draft_head_line(proposal: Proposal) -> list[BudgetLine]:
    """Return the budget line of the draft's copy of rows of the head; [] if there is none."""
    speculative = proposal.speculative
    rows = speculative.options.head_rows() if speculative is not None else 0
    if not rows:
        return []
    whole = proposal.draft
    model = proposal.facts.model if whole is None else whole.facts.model
    own = -(-rows // axis_size("attn_tp", proposal.values.mesh))
    size = own * model.hidden_size * DTYPE_BYTES[proposal.values.dtype]
    return [BudgetLine(DRAFT_HEAD, size, f"{rows} tokens that drafts choose from")]


def _draft_state_line(proposal: Proposal, rows: int) -> list[BudgetLine]:
    """Return the budget line of the state that drafts reserve for each row; [] if there is none.

    The buffers that a draft's own attention reserves on a device are part of the line.
    """
    speculative = proposal.speculative
    if speculative is None:
        return []
    reserves = speculative.offers.reserves
    size = reserves(_decoding_rows(proposal, rows)) if reserves is not None else 0
    if proposal.draft is not None and proposal.values.device == "cuda":
        size += sum(line.bytes for line in _attention_line(proposal.draft, rows))
    how = f"of {speculative.name}, {_rows_of_tokens(proposal, rows)}"
    return [BudgetLine(DRAFT_STATE, size, how)] if size else []


def _decoding_rows(proposal: Proposal, rows: int) -> DecodingRows:
    """Return the largest decode step. ``rows``: most running sequences."""
    values = proposal.values
    positions = _longest(proposal) + values.width + values.lookahead
    heads = -(-proposal.facts.model.num_heads // axis_size("attn_tp", values.mesh))
    width = max(values.width, values.draft_shape.topk)
    return DecodingRows(
        rows + 1,
        positions,
        values.page_size,
        width,
        heads,
        values.draft_extends and proposal.draft is None,
        proposal.facts.model.hidden_size * DTYPE_BYTES[values.dtype],
    )


def _rows_of_tokens(proposal: Proposal, rows: int) -> str:
    return f"{rows} rows of {_longest(proposal)} tokens"


def _longest(proposal: Proposal) -> int:
    """Return the tokens of the longest sequence, which the KV cache may limit further."""
    return proposal.config.context_length or proposal.facts.model.max_positions


def _collective_lines(proposal: Proposal, counts: Counts) -> list[BudgetLine]:
    """Return the budget lines of the exchange between ranks: buffers, and those of a library."""
    collectives = proposal.collectives
    if collectives is None:
        return []
    offers = collectives.offers
    sizes = _exchange_sizes(proposal, collectives.options, counts.groups * counts.step_tokens)
    size = offers.buffer_bytes(sizes) if offers.buffer_bytes is not None else 0
    if size and offers.expert_rows:
        size += sum(
            chosen.offers.buffer_bytes(
                _exchange_sizes(proposal, chosen.options, counts.step_tokens)
            )
            for chosen in proposal.parallel
            if chosen.offers.buffer_bytes is not None
        )
    library = offers.library_bytes(sizes) if offers.library_bytes is not None else 0
    found = (
        BudgetLine(EXCHANGE_BUFFERS, size, f"of {collectives.name}"),
        BudgetLine(EXCHANGE_LIBRARY, library, f"an estimate, of {collectives.name}"),
    )
    return [line for line in found if line.bytes]


def _exchange_sizes(proposal: Proposal, options: Options, tokens: int) -> ExchangeSizes:
    """Return the largest exchanges of a component; ``tokens``: see ``ExchangeSizes``."""
    values = proposal.values
    return ExchangeSizes.of(proposal.facts, options, values.mesh, tokens, values.dtype)


def _sampler(proposal: Proposal) -> SamplerOffers:
    """Return the sampler's offers, or default ones without a sampler."""
    sampler = proposal.sampling
    return sampler.offers if sampler is not None else SamplerOffers()


def _activation_line(proposal: Proposal, layers: LayerBytes, counts: Counts) -> BudgetLine:
    """Return the budget line of the activations of the largest step."""
    groups = counts.groups
    step_tokens = counts.step_tokens
    gathered = step_tokens * groups
    how = f"a step of {step_tokens} tokens"
    if groups > 1:
        how += f", {gathered} of {groups} groups in the feed-forward layers"
    if proposal.values.device == "cuda":
        step = _largest_step(proposal, counts, gathered)
        size = layers.with_features(step, features_of(proposal))
        if proposal.draft is not None:
            drafts = LayerBytes(proposal.draft)
            size = max(size, drafts.with_features(step, features_of(proposal.draft)))
    else:
        size = max(_on_host(one, step_tokens, gathered) for one in proposal.models)
    return BudgetLine("activations", size, how)


def _largest_step(proposal: Proposal, counts: Counts, gathered: int) -> StepTokens:
    """Return the token counts of the largest step, which ``warmup.most_tokens`` runs.

    The longest row of this step computes a chunk of prompt tokens. Before them it has the same
    number of cached tokens, or fewer if the longest sequence has no room for as many.
    """
    width = proposal.values.width
    context = proposal.config.context_length or proposal.facts.model.max_positions
    longest = max(1, min(counts.chunk, context - width))
    cached = max(0, min(longest, context - width - longest))
    return StepTokens(counts.step_tokens, gathered, longest, cached)


def _logit_line(proposal: Proposal, layers: LayerBytes, rows: int) -> BudgetLine:
    """Return the budget line of the logits.

    The line covers a step that samples all rows with every sampling parameter, and the scoring of a
    prompt.
    """
    model = proposal.facts.model
    parts = axis_size("attn_tp", proposal.values.mesh)
    vocabulary = -(-model.vocab_size // parts) * parts
    count = rows * proposal.values.width
    copies = HOST_COPIES
    size = int(count * vocabulary * 4 * copies)
    if proposal.values.device == "cuda":
        held = _held_rows(proposal, count, parts)
        copies = held / count
        size = max(
            int(held * vocabulary) * 4
            + count * model.hidden_size * DTYPE_BYTES[proposal.values.dtype],
            layers.activations(layers.even_step(max(count, SCORED + 1))),
        )  # a prompt's first token is not scored
    return BudgetLine(
        "logits", size, f"{count} rows of {vocabulary} tokens, float32, {copies:.3g} copies"
    )


def _held_rows(proposal: Proposal, count: int, parts: int) -> float:
    """Return the rows of logits that a GPU holds at once in a step that samples ``count`` rows.

    ``parts``: number of ranks that share the vocabulary.
    """
    scratch = _sampler(proposal).scratch_rows
    whole = max(count + (scratch(count) if scratch else 0), SCORED_COPIES * SCORED)
    return whole + slice_rows(count, parts)


def _on_host(proposal: Proposal, own: int, gathered: int) -> int:
    """Return the bytes of activations of a step on a CPU.

    Args:
        own: tokens of this rank's dp group, which attention computes.
        gathered: tokens of all groups, which feed-forward layers compute.
    """
    model = proposal.facts.model
    mesh = proposal.values.mesh
    element = DTYPE_BYTES[proposal.values.dtype]
    width = max(
        -(-model.sizes.width // axis_size("tp", mesh)),
        -(-model.sizes.expert_width // axis_size("moe_tp", mesh)),
        model.hidden_size,
    )
    heads = -(-model.num_heads // axis_size("attn_tp", mesh)) * (model.head_dim + model.sizes.value)
    kept = 4 + 2 * features_of(proposal)
    numbers = own * (kept * model.hidden_size + 3 * heads) + gathered * (
        2 * model.hidden_size + 3 * width
    )
    return int(numbers * max(element, 4))


def _rope_tables(proposal: Proposal) -> BudgetLine:
    """Return the budget line of the rotary tables of the model and of its draft."""
    models = [proposal.facts.model] * (1 + proposal.values.draft_layers)
    if proposal.draft is not None:
        models.append(proposal.draft.facts.model)
    positions = _longest(proposal)
    numbers = sum(model.qk_rope_head_dim or model.head_dim for model in models)
    how = f"{positions} positions, float32" + (", twice" if len(models) > 1 else "")
    return BudgetLine("rotary tables", positions * numbers * 4, how)
