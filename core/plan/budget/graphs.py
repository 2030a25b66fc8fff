"""Captured graphs: their batch sizes and token counts, and their estimated memory. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import BudgetLine
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.offers import AttentionOffers, Mode
from glowplug.core.plugin.options import GraphOptions
from glowplug.core.plugin.slots import CAPTURED_SLOTS

MIB = 1 << 20
PAGE = 64  #: tokens per page, exact enough for the size of page tables
# NOTE: memory of the driver, fitted to six engines on an H200: 3 and 27 layers, 26 and 34 batch
# sizes, with a draft and without
FIXED = 80 * MIB  #: bytes of the driver that do not depend on the number of graphs
PER_SIZE = 5 * MIB // 8  #: bytes of the driver for sampling in the graphs of one batch size
#: bytes of the driver for a layer in the graphs of one batch size: parameters of its kernels
PER_LAYER = MIB // 20
PER_PIECE = 7 * MIB // 64  #: bytes of the driver for a layer of one token count, a graph of its own
#: bytes of the driver for a further graph of one batch size: a draft's pass, or token positions
PER_DRAFT = MIB // 3
#: bytes of a token's id, position and kv slot, inputs of a draft's pass beside the hidden state
EXTEND_INDEX_BYTES = 3 * 8
STREAM = 32 * MIB  #: bytes of cuBLAS's workspace for the capturing stream
SEGMENT_SLACK = 12 * MIB  #: unused bytes of expandable segments, which grow by 20 MiB
#: memory of logits and of a captured step's results from them, in copies of the logits
LOGIT_COPIES = 1.03
PASS_SLACK = 32 * MIB  #: most unused bytes in the blocks of the largest pass's tensors
DECODE_SLACK = PASS_SLACK // 2  #: most unused bytes in the blocks of the largest decode step


def driver_bytes(
    sizes: int, layers: int, counts: int = 0, drafts: int = 0, extends: int = 0
) -> int:
    """Return the memory of the driver for graphs.

    Args:
        sizes: number of batch sizes.
        layers: number of layers of the model.
        counts: number of token counts.
        drafts: passes of the draft model before a step. Each has a graph of its own, and there are
            two more: for the positions of the draft's tokens and for those of the step's.
        extends: number of token counts for which the draft's pass over a step's tokens is captured.
    """
    beside = drafts + 2 if drafts else 0
    of_passes = (layers * counts + extends) * PER_PIECE
    return FIXED + sizes * (PER_SIZE + beside * PER_DRAFT + layers * PER_LAYER) + of_passes


def pool_bytes(decoding: int, passing: int, grows: bool = False) -> int:
    """Return the bytes of the pool that all graphs share.

    Decode steps are captured first. Blocks of a larger pass do not fit into theirs. If the decode
    steps' blocks are larger, or segments are expandable, they can hold most of the pass (on an
    H200: V3's pool is 2,063 MiB for 499 and 1,564 MiB, V2-Lite's 307 MiB for 282 and 181 MiB).

    Args:
        decoding: bytes that the allocator takes for the largest decode step alone.
        passing: bytes that it takes for the largest captured pass with prompts alone.
        grows: the allocator uses expandable segments.
    """
    if passing > decoding and not grows:
        return decoding + passing
    return max(decoding, passing) + min(decoding, passing) // 4


def grown_pool_bytes(step: int, logits: int, passing: int) -> int:
    """Return the bytes of the graphs' pool with expandable segments.

    The formula was fitted on an H200: to one shape, and to the largest pass of another.

    Args:
        step: bytes of tensors in the layers of the largest decode step.
        logits: bytes of its logits, which follow the layers.
        passing: bytes of tensors in the largest captured pass with prompts.
    """
    decoding = max(step, logits)
    return pool_bytes(decoding, passing, grows=True) + min(PASS_SLACK, decoding)


def kept_bytes(
    model: ModelFacts,
    sizes: Sequence[int],
    counts: Sequence[int],
    columns: int,
    element: int,
    grows: bool = False,
    extends: Sequence[int] = (),
) -> int:
    """Return the bytes that graphs keep beside their pool.

    These are a page table for each batch size, the results of attention in the largest pass, the
    inputs of the largest draft pass, and a workspace.

    Args:
        sizes: captured batch sizes.
        counts: captured token counts.
        columns: columns of a page table.
        element: bytes of an element in the compute dtype.
        grows: the allocator uses expandable segments.
        extends: captured token counts of the draft's pass over a step's tokens.
    """
    width = model.num_heads * (model.sizes.value or model.head_dim) * element
    begins = max(extends, default=0) * (model.hidden_size * element + EXTEND_INDEX_BYTES)
    return (
        STREAM
        + SEGMENT_SLACK * grows
        + sum(sizes) * columns * 4
        + max(counts, default=0) * width
        + begins
    )


def pass_tokens(proposal: Proposal, step_tokens: int) -> tuple[int, ...]:
    """Return the token counts for which passes with prompts are captured.

    None are captured on several ranks, because the number of exchanged rows differs between steps.
    """
    runner = proposal.first("graphs")
    if runner is None or not isinstance(runner.options, GraphOptions) or proposal.values.ranks > 1:
        return ()
    inside = [chosen for slot in CAPTURED_SLOTS for chosen in proposal.chosen.get(slot, ())]
    capturable = all(Mode.PREFILL in chosen.offers.captures_in for chosen in inside)
    return runner.options.token_counts(step_tokens) if capturable else ()


def extend_tokens(proposal: Proposal, step_tokens: int) -> tuple[int, ...]:
    """Return the token counts for which the draft's pass over a step's tokens is captured.

    They are those of the target's passes if all components of the pass can be captured. Attention
    only stores keys and values in this pass, as in the captured decode steps.
    """
    taking = [
        chosen
        for slot in (*CAPTURED_SLOTS, "speculative")
        for chosen in proposal.chosen.get(slot, ())
    ]
    capturable = proposal.values.lookahead and all(
        Mode.DRAFT_EXTEND in one.offers.captures_in for one in taking
    )
    return pass_tokens(proposal, step_tokens) if capturable else ()


def short_steps(proposal: Proposal, rows: int, context: int) -> tuple[int, tuple[int, ...]]:
    """Return ``Sizes.short_keys`` and ``Sizes.short_rows``; (0, ()) if there are no such graphs.

    They are captured on one rank only, because other ranks may have longer rows, and only without
    drafts.

    Args:
        rows: most running sequences.
        context: longest sequence in tokens.
    """
    runner = proposal.first("graphs")
    attention = proposal.first("attention")
    if runner is None or not isinstance(runner.options, GraphOptions) or attention is None:
        return 0, ()
    offers = attention.offers
    width = proposal.values.width
    if (
        not isinstance(offers, AttentionOffers)
        or offers.short_rows is None
        or width > 1
        or context + width + proposal.values.lookahead <= offers.short_keys
        or proposal.values.ranks > 1
    ):
        return 0, ()
    short = offers.short_rows(proposal.facts.model.num_heads)
    sizes = tuple(size for size in runner.options.sizes(rows) if size in short)
    return (offers.short_keys, sizes) if sizes else (0, ())


def graph_line(
    proposal: Proposal, rows: int, step_tokens: int, step_bytes: Callable[[int], int]
) -> BudgetLine | None:
    """Return the budget line of the graphs; None without graphs.

    The captured batch sizes and token counts are recorded as decisions. All graphs share one pool.
    Without expandable segments, the logits of a decode step, and the tensors of sampling, do not
    fit into the blocks that its activations have freed.

    Args:
        rows: most running sequences.
        step_tokens: most tokens of a step.
        step_bytes: function from a number of tokens to the activation bytes of such a step.
    """
    runner = proposal.first("graphs")
    if runner is None or not isinstance(runner.options, GraphOptions):
        return None
    sizes = runner.options.sizes(rows)
    if not sizes:
        return None
    _decide(proposal, sizes, rows)
    counts = pass_tokens(proposal, step_tokens)
    extends = extend_tokens(proposal, step_tokens)
    how = f"{len(sizes)} batch sizes up to {sizes[-1]}"
    context = proposal.config.context_length or proposal.facts.model.max_positions
    _, short = short_steps(proposal, rows, context)
    if short:
        how += f", {len(short)} of them for short rows too"
    if counts:
        _decide_counts(proposal, counts, step_tokens)
        how += f", {len(counts)} token counts up to {counts[-1]}" + ", of the draft too" * bool(
            extends
        )
    tokens = sizes[-1] * proposal.values.width
    logits = int(tokens * proposal.facts.model.vocab_size * 4 * LOGIT_COPIES)
    decoding = step_bytes(tokens)
    passing = step_bytes(counts[-1]) if counts else 0
    grows = proposal.values.growing_segments
    if grows:
        pool = grown_pool_bytes(decoding, logits, passing)
    else:
        pool = pool_bytes(
            decoding + min(DECODE_SLACK, decoding) + logits, passing + min(PASS_SLACK, passing)
        )
    columns = context // PAGE + 1
    model = proposal.facts.model
    drafts = proposal.values.lookahead
    kept = kept_bytes(
        model, sizes + short, counts, columns, DTYPE_BYTES[proposal.values.dtype], grows, extends
    )
    driver = driver_bytes(len(sizes + short), model.num_layers, len(counts), drafts, len(extends))
    return BudgetLine("graphs", driver + kept + pool, f"{how}, one pool")


def _decide(proposal: Proposal, sizes: tuple[int, ...], rows: int) -> None:
    """Record the captured batch sizes: the given ones that can run, or the default."""
    asked = getattr(proposal.config.graphs, "batch_sizes", None)
    if asked is None:
        proposal.decide(
            "graphs.batch_sizes",
            list(sizes),
            "size",
            f"default, up to {sizes[-1]} of {rows} sequences",
        )
        return
    by, why = proposal.source("graphs.batch_sizes") or ("operator", "")
    left_out = sorted(set(asked) - set(sizes))
    if left_out:
        limit = (
            f"at most {rows} sequences run" if left_out[-1] > rows else "graphs.max_batch is lower"
        )
        why += f"; without {', '.join(map(str, left_out))}: {limit}"
    proposal.decide("graphs.batch_sizes", list(sizes), by, why)


def _decide_counts(proposal: Proposal, counts: tuple[int, ...], step_tokens: int) -> None:
    """Record the captured token counts: the given ones that can occur, or the default."""
    asked = getattr(proposal.config.graphs, "prefill_tokens", None)
    by = "size"
    why = f"default, up to {counts[-1]} of {step_tokens} tokens per step"
    if asked is not None:
        left_out = sorted(set(asked) - set(counts))
        by, why = proposal.source("graphs.prefill_tokens") or ("operator", "")
        if left_out:
            limit = (
                f"a step has at most {step_tokens} tokens"
                if left_out[-1] > step_tokens
                else "graphs.max_prefill_tokens is lower"
            )
            why += f"; without {', '.join(map(str, left_out))}: {limit}"
    proposal.decide("graphs.prefill_tokens", list(counts), by, why)
