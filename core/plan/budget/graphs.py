"""What captured graphs take: the plan's estimate, and for which batch sizes and token counts there
are some. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.parameters import stated
from glowplug.core.plan.plan import BudgetLine
from glowplug.core.plan.proposal import Draft
from glowplug.core.plugin.offers import AttentionOffers, Mode
from glowplug.core.plugin.options import GraphOptions
from glowplug.core.plugin.slots import CAPTURED_SLOTS

MIB = 1 << 20
PAGE = 64  #: tokens a page, near enough for what page tables take
# NOTE: the driver's, fitted to six engines on an H200: 3 and 27 layers, 26 and 34 batch sizes, with
# a draft and without
FIXED = 80 * MIB  #: what it takes however many graphs there are
PER_SIZE = 5 * MIB // 8  #: what the graphs of one batch size take for sampling
PER_LAYER = (
    MIB // 20
)  #: what it takes for a layer in the graphs of one batch size: parameters of its kernels
PER_PIECE = 7 * MIB // 64  #: the same of one token count, whose layers are graphs of their own
PER_DRAFT = (
    MIB // 3
)  #: a graph of one batch size beside the model's: a draft's pass, or where tokens go
EXTENDED = (
    3 * 8
    #: of each token that a draft's pass begins with, beside a hidden state: its id, position and slot
)
STREAM = 32 * MIB  #: cuBLAS's workspace for the stream that captures
GROWN = 12 * MIB  #: what segments that grow by 20 MiB have to spare
SAMPLED = 1.03  #: logits with what a captured step makes of them
GRAIN = 32 * MIB  #: what blocks of the largest pass's tensors have to spare, at most
FEW = GRAIN // 2  #: the same of the largest decoding step


def driver_bytes(
    sizes: int, layers: int, counts: int = 0, drafts: int = 0, extends: int = 0
) -> int:
    """What the driver takes for the graphs of so many batch sizes and token counts of a model,
    before which ``drafts`` passes run. Those have a graph each, and their places and the step's own
    one more. ``extends``: token counts for which a draft's pass over a step's tokens is a graph."""
    beside = drafts + 2 if drafts else 0
    of_passes = (layers * counts + extends) * PER_PIECE
    return FIXED + sizes * (PER_SIZE + beside * PER_DRAFT + layers * PER_LAYER) + of_passes


def pool_bytes(decoding: int, passing: int, grows: bool = False) -> int:
    """The pool that all graphs share, from what the allocator takes for the largest decoding step
    and for the largest
    pass alone. ``grows``: the allocator's segments do.

    Decoding steps are captured first. The blocks of a larger pass do not fit in theirs, while
    blocks that are larger, or grow, hold most of a pass (on an H200: V3's pool 2,063 MiB of 499 and
    1,564; V2-Lite's 307 of 282 and 181).
    """
    if passing > decoding and not grows:
        return decoding + passing
    return max(decoding, passing) + min(decoding, passing) // 4


def grown_pool_bytes(step: int, logits: int, passing: int) -> int:
    """The same where the allocator grows its segments, from what tensors take: a decoding step's
    layers and its logits, one after the other, and the largest pass (one shape on an H200, and the
    largest pass of another).
    """
    decoding = max(step, logits)
    return pool_bytes(decoding, passing, grows=True) + min(GRAIN, decoding)


def kept_bytes(
    model: ModelFacts,
    sizes: Sequence[int],
    counts: Sequence[int],
    columns: int,
    element: int,
    grows: bool = False,
    extends: Sequence[int] = (),
) -> int:
    """What stays beside the graphs' pool: a page table of ``columns`` for each batch size, what
    attention leaves behind in the largest pass and what the largest of a draft's, of ``extends``
    tokens, begins with, in numbers of ``element``
    bytes, and a workspace. ``grows``: the allocator's segments do."""
    width = model.num_heads * stated(model, "v_head_dim", model.head_dim) * element
    begins = max(extends, default=0) * (model.hidden_size * element + EXTENDED)
    return (
        STREAM + GROWN * grows + sum(sizes) * columns * 4 + max(counts, default=0) * width + begins
    )


def pass_tokens(draft: Draft, step_tokens: int) -> tuple[int, ...]:
    """Token counts whose passes are captured: none on several ranks, which exchange rows of each
    step's own number.
    """
    runner = draft.first("graphs")
    if runner is None or not isinstance(runner.options, GraphOptions) or draft.values["ranks"] > 1:
        return ()
    inside = [chosen for slot in CAPTURED_SLOTS for chosen in draft.chosen.get(slot, ())]
    capturable = all(Mode.PREFILL in chosen.offers.captures_in for chosen in inside)
    return runner.options.token_counts(step_tokens) if capturable else ()


def extend_tokens(draft: Draft, step_tokens: int) -> tuple[int, ...]:
    """Token counts for which a draft's pass over a step's tokens is captured: those of the target's
    passes, where all that takes part allows it. Attention only stores in it, as in the captured
    steps of decoding rows.
    """
    taking = [
        chosen for slot in (*CAPTURED_SLOTS, "speculative") for chosen in draft.chosen.get(slot, ())
    ]
    capturable = draft.values["lookahead"] and all(
        Mode.DRAFT_EXTEND in one.offers.captures_in for one in taking
    )
    return pass_tokens(draft, step_tokens) if capturable else ()


def short_steps(draft: Draft, rows: int, context: int) -> tuple[int, tuple[int, ...]]:
    """``Sizes.short_keys`` and ``Sizes.short_rows`` where ``rows`` sequences of at most ``context``
    tokens may run: on one rank, since others' rows may be longer, and without drafts."""
    runner = draft.first("graphs")
    attention = draft.first("attention")
    if runner is None or not isinstance(runner.options, GraphOptions) or attention is None:
        return 0, ()
    offers = attention.offers
    width = draft.values["width"]
    if (
        not isinstance(offers, AttentionOffers)
        or offers.short_rows is None
        or width > 1
        or context + width + draft.values["lookahead"] <= offers.short_keys
        or draft.values["ranks"] > 1
    ):
        return 0, ()
    short = offers.short_rows(draft.facts.model.num_heads)
    sizes = tuple(size for size in runner.options.sizes(rows) if size in short)
    return (offers.short_keys, sizes) if sizes else (0, ())


def graph_line(
    draft: Draft, rows: int, step_tokens: int, step_bytes: Callable[[int], int]
) -> BudgetLine | None:
    """Where ``rows`` sequences may run, in steps of ``step_tokens`` at most; ``step_bytes`` of a
    number of tokens: what activations of such a step take. None without graphs. Says in the plan
    which batch sizes and token counts are captured.

    All graphs share one pool. A decoding step's logits, with what sampling makes of them, find no
    room in the blocks that its activations have left, unless segments grow.
    """
    runner = draft.first("graphs")
    if runner is None or not isinstance(runner.options, GraphOptions):
        return None
    sizes = runner.options.sizes(rows)
    if not sizes:
        return None
    _decide(draft, sizes, rows)
    counts = pass_tokens(draft, step_tokens)
    extends = extend_tokens(draft, step_tokens)
    how = f"{len(sizes)} batch sizes up to {sizes[-1]}"
    context = draft.config.context_length or draft.facts.model.max_positions
    _, short = short_steps(draft, rows, context)
    if short:
        how += f", {len(short)} of them for short rows too"
    if counts:
        _decide_counts(draft, counts, step_tokens)
        how += f", {len(counts)} token counts up to {counts[-1]}" + ", of the draft too" * bool(
            extends
        )
    tokens = sizes[-1] * draft.values["width"]
    logits = int(tokens * draft.facts.model.vocab_size * 4 * SAMPLED)
    decoding = step_bytes(tokens)
    passing = step_bytes(counts[-1]) if counts else 0
    grows = draft.values["growing_segments"]
    if grows:
        pool = grown_pool_bytes(decoding, logits, passing)
    else:
        pool = pool_bytes(decoding + min(FEW, decoding) + logits, passing + min(GRAIN, passing))
    columns = context // PAGE + 1
    model = draft.facts.model
    drafts = draft.values["lookahead"]
    kept = kept_bytes(
        model, sizes + short, counts, columns, DTYPE_BYTES[draft.values["dtype"]], grows, extends
    )
    driver = driver_bytes(len(sizes + short), model.num_layers, len(counts), drafts, len(extends))
    return BudgetLine("graphs", driver + kept + pool, f"{how}, one pool")


def _decide(draft: Draft, sizes: tuple[int, ...], rows: int) -> None:
    """The list as it is captured: the operator's without what cannot run, or the default."""
    asked = getattr(draft.config.graphs, "batch_sizes", None)
    if asked is None:
        draft.decide(
            "graphs.batch_sizes",
            list(sizes),
            "size",
            f"default, up to {sizes[-1]} of {rows} sequences",
        )
        return
    by, why = draft.source("graphs.batch_sizes") or ("operator", "")
    left_out = sorted(set(asked) - set(sizes))
    if left_out:
        limit = (
            f"{rows} sequences run at most" if left_out[-1] > rows else "graphs.max_batch is lower"
        )
        why += f"; without {', '.join(map(str, left_out))}: {limit}"
    draft.decide("graphs.batch_sizes", list(sizes), by, why)


def _decide_counts(draft: Draft, counts: tuple[int, ...], step_tokens: int) -> None:
    asked = getattr(draft.config.graphs, "prefill_tokens", None)
    by = "size"
    why = f"default, up to {counts[-1]} of {step_tokens} tokens a step"
    if asked is not None:
        left_out = sorted(set(asked) - set(counts))
        by, why = draft.source("graphs.prefill_tokens") or ("operator", "")
        if left_out:
            limit = (
                f"a step has {step_tokens} at most"
                if left_out[-1] > step_tokens
                else "graphs.max_prefill_tokens is lower"
            )
            why += f"; without {', '.join(map(str, left_out))}: {limit}"
    draft.decide("graphs.prefill_tokens", list(counts), by, why)
