"""Estimated memory of captured graphs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.budget.captured import Captured
from glowplug.core.plan.budget.units import MIB
from glowplug.core.plan.plan import BudgetLine, EnginePlan
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.draft_shape import DraftShape

PAGE = 64  #: tokens per page, exact enough for the size of page tables
# NOTE: memory of the driver, fitted to six engines on an H200: 3 and 27 layers, 26 and 34 batch
# sizes, with a draft and without
FIXED = 80 * MIB  #: bytes of the driver that do not depend on the number of graphs
PER_SIZE = 5 * MIB // 8  #: bytes of the driver for sampling in the graphs of one batch size
#: bytes of the driver for a layer in the graphs of one batch size: parameters of its kernels
PER_LAYER = MIB // 20
PER_PIECE = 7 * MIB // 64  #: bytes of the driver for a layer of one token count, a graph of its own
#: bytes of the driver for a draft's pass, or token positions, in the graphs of one batch size
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
    sizes: int, layers: int, counts: int = 0, drafts: float = 0, extends: int = 0
) -> int:
    """Return the bytes of memory that the driver takes for graphs.

    Args:
        sizes: number of captured batch sizes.
        layers: number of layers of the model.
        counts: number of captured token counts of passes with prompts.
        drafts: number of passes of the draft model before a step, the mean over the captured
            steps. Each pass counts like a graph, and so do the positions of the draft's tokens and
            of the step's tokens, which were graphs of their own when this was fitted. They are one
            where attention plans on the device, which takes no more.
        extends: number of token counts for which the draft's pass over a step's tokens is captured.
    """
    beside = drafts + 2 if drafts else 0
    of_passes = (layers * counts + extends) * PER_PIECE
    return FIXED + int(sizes * (PER_SIZE + beside * PER_DRAFT + layers * PER_LAYER)) + of_passes


def pool_bytes(decoding: int, passing: int, expandable: bool = False) -> int:
    """Return the bytes of the pool that all graphs share.

    Decode steps are captured first. If the pass is larger, its blocks do not fit into those of the
    decode steps, and both count in full (V3 on an H200: 499 and 1,564 MiB, pool 2,063 MiB). If the
    decode steps are larger, or segments are expandable, the blocks of the decode steps can hold
    most of the pass (V2-Lite: 282 and 181 MiB, pool 307 MiB).

    Args:
        decoding: bytes that the allocator takes for the largest decode step alone.
        passing: bytes that it takes for the largest captured pass with prompts alone.
        expandable: the allocator uses expandable segments.
    """
    if passing > decoding and not expandable:
        return decoding + passing
    return max(decoding, passing) + min(decoding, passing) // 4


def grown_pool_bytes(step: int, logits: int, passing: int) -> int:
    """Return the bytes of the pool that all graphs share, if segments are expandable.

    The formula was fitted on an H200: to one shape, and to the largest pass of another.

    Args:
        step: bytes of tensors in the layers of the largest decode step.
        logits: bytes of that step's logits, which are computed after the layers.
        passing: bytes of tensors in the largest captured pass with prompts.
    """
    decoding = max(step, logits)
    return pool_bytes(decoding, passing, expandable=True) + min(PASS_SLACK, decoding)


@dataclass(frozen=True)
class GraphSet:
    """Numbers of one rank's captured graphs that decide their memory beside the pool.

    Attributes:
        model: facts of the model.
        batch_sizes: captured batch sizes.
        pass_tokens: captured token counts of passes with prompts.
        extend_tokens: captured token counts of the draft's pass over a step's tokens.
        drafts: number of passes of the draft model before a step, the mean over the captured steps.
        columns: columns of a page table.
        element: bytes of an element in the compute dtype.
        expandable: the allocator uses expandable segments.
        head_ranks: number of ranks that share the attention heads.
    """

    model: ModelFacts
    batch_sizes: Sequence[int]
    pass_tokens: Sequence[int]
    extend_tokens: Sequence[int]
    drafts: float
    columns: int
    element: int
    expandable: bool
    head_ranks: int

    @property
    def bytes_beside_pool(self) -> int:
        """Bytes that the driver and the graphs take beside the graphs' pool."""
        driver = driver_bytes(
            len(self.batch_sizes),
            self.model.num_layers,
            len(self.pass_tokens),
            self.drafts,
            len(self.extend_tokens),
        )
        return driver + self._kept_bytes

    @property
    def _kept_bytes(self) -> int:
        """Bytes that graphs keep beside their pool.

        These are a page table for each batch size, the results of attention in the largest pass,
        the inputs of the largest draft pass, and a workspace.
        """
        model = self.model
        heads = -(-model.num_heads // self.head_ranks)
        width = heads * (model.sizes.value or model.head_dim) * self.element
        extend_width = model.hidden_size * self.element + EXTEND_INDEX_BYTES
        return (
            STREAM
            + SEGMENT_SLACK * self.expandable
            + sum(self.batch_sizes) * self.columns * 4
            + max(self.pass_tokens, default=0) * width
            + max(self.extend_tokens, default=0) * extend_width
        )


def graph_line(
    proposal: Proposal, captured: Captured, step_bytes: Callable[[int], int]
) -> BudgetLine | None:
    """Return the budget line of the captured graphs; None if no steps are captured.

    Args:
        captured: the captured steps.
        step_bytes: function from a number of tokens to the activation bytes of such a step.
    """
    if not captured.batch_sizes:
        return None
    model = proposal.facts.model
    whole = proposal.whole_draft
    shapes = proposal.values.draft_shapes
    batch_sizes = captured.batch_sizes * len(shapes) + captured.short_rows
    context = proposal.config.context_length or model.max_positions
    graphs = GraphSet(
        model=model,
        batch_sizes=batch_sizes,
        pass_tokens=captured.pass_tokens,
        extend_tokens=captured.extend_tokens,
        drafts=mean_passes(shapes, whole.facts.model.num_layers if whole is not None else 0),
        columns=context // PAGE + 1,
        element=DTYPE_BYTES[proposal.values.dtype],
        expandable=proposal.values.expandable_segments,
        head_ranks=axis_size("attn_tp", proposal.values.mesh),
    )
    pool = _pool_bytes(proposal, captured, step_bytes)
    how = _described(captured, len(shapes))
    return BudgetLine("graphs", graphs.bytes_beside_pool + pool, f"{how}, one pool")


def _pool_bytes(proposal: Proposal, captured: Captured, step_bytes: Callable[[int], int]) -> int:
    """Return the bytes of the pool that all graphs share.

    Without expandable segments, the logits and the tensors of sampling count in addition to the
    activations of a decode step, because they do not fit into the blocks that these have freed.
    """
    values = proposal.values
    tokens = captured.batch_sizes[-1] * values.width
    row = proposal.facts.model.vocab_size * 4
    own = int(slice_rows(tokens, axis_size("attn_tp", values.mesh)) * row)
    logits = int(tokens * row * LOGIT_COPIES) + own
    decoding = step_bytes(tokens)
    most = captured.pass_tokens[-1] if captured.pass_tokens else 0
    passing = step_bytes(most) + _exchanged_bytes(proposal, most) if most else 0
    if values.expandable_segments:
        return grown_pool_bytes(decoding, logits, passing)
    return pool_bytes(
        decoding + min(DECODE_SLACK, decoding) + logits, passing + min(PASS_SLACK, passing)
    )


def slice_rows(rows: int, parts: int) -> float:
    """Return a rank's slice of ``rows`` rows of logits, in whole rows; 0 for an undivided head.

    The slice stays until the step ends, beside the gathered logits. ``parts``: number of ranks that
    share the vocabulary.
    """
    return rows / parts if parts > 1 else 0.0


def _exchanged_bytes(proposal: Proposal, tokens: int) -> int:
    """Return the bytes of exchanged tensors in the pool of a pass of ``tokens`` tokens a group.

    A captured pass holds the result of an all-reduce beside its input, or with dp groups the
    gathered hidden states and the sums that are scattered. Fitted to three engines on two H200,
    whose graphs then take 1% to 3.5% more than planned: V2-Lite and five layers of V3 at tp 2, and
    these layers at dp 2, ep 2.
    """
    values = proposal.values
    if values.ranks == 1:
        return 0
    groups = axis_size("dp", values.mesh)
    state = tokens * groups * proposal.facts.model.hidden_size * DTYPE_BYTES[values.dtype]
    return state * (2 if groups > 1 else 1)


def mean_passes(shapes: Sequence[DraftShape], layers: int = 0) -> float:
    """Return the mean number of passes of the draft before steps with drafts of these sizes.

    A draft that is a whole model runs one pass more, and its passes count as as many passes of one
    layer as take the same memory.

    Args:
        shapes: the sizes.
        layers: number of layers of a draft that is a whole model; 0 for other drafts.
    """
    passes = sum(shape.steps for shape in shapes) / len(shapes)
    return (passes + 1) * (1 + layers * PER_LAYER / PER_DRAFT) if layers else passes


def beside_pool(plan: EnginePlan, batch_sizes: Sequence[int]) -> int:
    """Return the bytes that the driver and the graphs of ``plan`` take beside the graphs' pool.

    ``batch_sizes``: captured batch sizes.
    """
    sizes = plan.sizes
    whole = plan.facts.draft if plan.whole_draft else None
    return GraphSet(
        model=plan.facts.model,
        batch_sizes=batch_sizes,
        pass_tokens=sizes.pass_tokens,
        extend_tokens=sizes.extend_tokens,
        drafts=mean_passes(sizes.step_shapes, whole.num_layers if whole is not None else 0),
        columns=-(-sizes.positions // sizes.page_size),
        element=DTYPE_BYTES[plan.dtype],
        expandable=plan.expandable_segments,
        head_ranks=axis_size("attn_tp", plan.mesh),
    ).bytes_beside_pool


def _described(captured: Captured, shapes: int) -> str:
    """Return the number and the largest size of the captured steps as text.

    ``shapes``: number of sizes of the drafts.
    """
    sizes = captured.batch_sizes
    counts = captured.pass_tokens
    parts = [f"{len(sizes)} batch sizes up to {sizes[-1]}"]
    if shapes > 1:
        parts.append(f"each for {shapes} sizes of drafts")
    if captured.short_rows:
        parts.append(f"{len(captured.short_rows)} of them for short rows too")
    if counts:
        parts.append(f"{len(counts)} token counts up to {counts[-1]}")
        if captured.extend_tokens:
            parts.append("of the draft too")
    return ", ".join(parts)
