"""A step's batch and its result.

The scheduler builds the batch, the runner completes it, and the model only reads it.

Order of rows: decoding rows first (``width`` tokens each), then prefill rows (a chunk each). Tokens
are flattened in row order. Shapes: B rows, T tokens, D decoding rows, W = width, P = pages of the
longest row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.modes import Mode
from glowplug.core.step.draft_tree import DraftTree
from glowplug.core.step.graph_pieces import DIRECT, GraphPieces
from glowplug.core.step.request import Sequence

if TYPE_CHECKING:
    import torch


#: key of ``Batch.extra`` for the hidden states that a draft model continues, [T, hidden]
PREVIOUS_HIDDEN = "previous_hidden"


@dataclass(eq=False)
class Batch:
    """The input of one step.

    The scheduler sets the fields above the line "set by the runner", on the host; the runner sets
    those below it, on the device.
    """

    step: int  #: number of the step
    mode: Mode  #: kind of work of the step
    rows: NDArray[np.int32]  #: [B] rows of the sequence table
    #: [B] row epochs at scheduling; a row whose epoch has changed is stale at the commit
    epochs: NDArray[np.int64]
    num_decodes: int  #: D
    query_lens: NDArray[np.int32]  #: [B] tokens computed in this step
    #: [B] KV length after this step (an upper bound while lengths are on the device)
    kv_lens: NDArray[np.int32]
    #: [B] the row yields a token (False: a chunk that does not end its prompt)
    samples: NDArray[np.bool_]
    prompt_ids: NDArray[np.int32]  #: tokens of the prefill rows, flattened
    pages: NDArray[np.int32]  #: [B, P] page numbers, 0 (scratch) where unused
    #: sequences that entered a row since the last batch
    joined: list[Sequence] = field(default_factory=list)
    #: rows whose sequence left since the last batch
    left: list[int] = field(default_factory=list)
    #: [B - D] token after each chunk; 0 where the chunk ends its prompt
    next_ids: NDArray[np.int32] | None = None
    #: [B - D] the chunk is the row's first one and begins behind a cached prefix
    resumed: NDArray[np.bool_] | None = None
    #: [B] log-probabilities of the chunk's own tokens are requested
    prompt_logprobs: NDArray[np.bool_] | None = None
    #: result of ``ParallelStrategy.agree`` for this step; set by the engine
    agreed: StepShape | None = None
    #: keys of the longest row in any step that replays this one's pieces; 0: ``Sizes.positions``
    longest: int = 0
    #: first cache position that is attended to; those before it are empty (a draft's batch: 1)
    first_key: int = 0
    #: size of the drafts of this step's decoding rows; None: the plan's
    draft_shape: DraftShape | None = None
    #: runs the pieces of this step: directly, or replayed from graphs
    pieces: GraphPieces = DIRECT
    #: simulated acceptance of the drafts (``core.speculation.simulated``), set by the runner; None:
    #: the target decides
    simulated: Any = None
    # ---- set by the runner -----------------------------------------------------------------------
    input_ids: Any = None  #: torch int64 [T]
    positions: Any = None  #: torch int64 [T]
    kv_slots: Any = None  #: torch int64 [T] KV slot of each token: page * page_size + offset
    row_ids: Any = None  #: torch int64 [B]
    kv_lens_device: Any = None  #: torch int32 [B]
    query_starts: Any = None  #: torch int32 [B + 1] prefix sums of query_lens
    page_table: Any = None  #: torch int32 [B, P]
    #: torch int64 [D, W], bit j of a token: it attends to key j of the last ``tree_span`` keys of
    #: its row, all of whose earlier keys it attends to; None: causal
    tree_mask: Any = None
    #: keys of a row that ``tree_mask`` names, its own W tokens last; 0: W
    tree_span: int = 0
    #: tokens of the decoding rows as trees, set by the speculative algorithm; None: chains
    tree: DraftTree | None = None
    #: torch int32 [D] number of drafts of each decoding row, set by the speculative algorithm; what
    #: follows them in ``input_ids`` only fills the row. None: all have ``draft_shape.tokens - 1``
    draft_counts: Any = None
    #: the algorithm has set exact positions, KV slots and lengths of the decoding rows
    placed: bool = False
    #: torch int64 [N] tokens whose logits are needed; None: all tokens
    logits_index: Any = None
    #: padding of the step; None: no expert ids are masked
    padding: Padding | None = None
    #: padding of the draft's passes before the step, of one token per decoding row
    draft_padding: Padding | None = None
    #: tokens at ``logits_index`` as a step of their own, for the last layer; None: all run it
    ends: Ends | None = None
    #: own fields of parallel and speculative plugins, by plugin
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    @property
    def decode_tokens(self) -> int:
        """Number of tokens of the decoding rows, which come first in the flattened order."""
        return int(self.query_lens[: self.num_decodes].sum())


@dataclass(eq=False)
class Ends:
    """The tokens of a step whose logits are sampled, as the input of the last layer.

    Attributes:
        count: N, the number of these tokens; the E - N entries behind them are padding.
        tokens: int64 [E], their indices among the step's tokens.
        batch: the tokens as E rows that decode one token each. All fields but ``input_ids`` and
            ``row_ids`` are set.
    """

    count: int
    tokens: torch.Tensor
    batch: Batch


@dataclass(frozen=True, eq=False)
class Padding:
    """The tokens that only pad a step of several groups of ranks; they choose no expert.

    Attributes:
        own: bool [T, 1] of this rank's tokens; None: none of them is padding.
        gathered: bool [groups * agreed tokens, 1] of the tokens of all groups, in order of group.
    """

    own: torch.Tensor | None
    gathered: torch.Tensor


@dataclass(eq=False)
class LogprobTensors:
    """Log-probabilities of N tokens on the device.

    Attributes:
        token: float32 [N], of the token itself.
        top_ids: int64 [N, K], ids of the K most likely tokens.
        top: float32 [N, K], their log-probabilities.
    """

    token: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass(eq=False)
class Accepted:
    """The results of a step on the device, from ``SpeculativeAlgorithm.accept``.

    Attributes:
        tokens: int64 [B, W]; row i holds ``counts[i]`` valid tokens.
        counts: int32 [B]; 0 for rows that do not sample.
        bad: bool [B]; True: the row's logits have NaN or +inf, or are all -inf.
        logprobs: log-probabilities of every entry of ``tokens``, flattened ([B * W]); None if no
            row requests them.
        packed: uint8, the bytes of tokens, counts, bad, and of ``drafts`` and ``next_drafts`` if
            they are set; set by the runner, so that one copy takes them all to the host.
        path: for trees of drafts, the token of the step after which each gained token was drawn:
            int64 [D, W], indices in the row. Entry i is i itself for i >= the number of gained
            tokens. The runner moves the KV entries of the path together. None for chains, whose
            accepted tokens are the first ones of the row.
        drafts: ``Batch.draft_counts`` of the step, int32 [D], set by the runner; None: all rows
            have as many drafts.
        next_drafts: number of drafts that each row has for its next step, int32 [B]; 0 for rows
            that do not sample. None: not known before that step, as without ``foresees`` in the
            algorithm's offers.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    bad: torch.Tensor
    logprobs: LogprobTensors | None = None
    packed: torch.Tensor | None = None
    path: torch.Tensor | None = None
    drafts: torch.Tensor | None = None
    next_drafts: torch.Tensor | None = None


@dataclass(eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens of one row.

    Attributes:
        row: row of the sequence table.
        start: position of the first token.
        token: [n], of the tokens themselves.
        top_ids: [n, K], ids of the K most likely tokens.
        top: [n, K], their log-probabilities.
    """

    row: int
    start: int
    token: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float32]


@dataclass(eq=False)
class StepResult:
    """The results of a step on the host, which the scheduler commits.

    Shapes are those of :class:`Accepted`.

    Attributes:
        tokens: int64 [B, W]; row i holds ``counts[i]`` valid tokens.
        counts: int32 [B]; 0 for rows that do not sample.
        bad: bool [B]; True: the row's logits have NaN or +inf, or are all -inf.
        logprobs: (log-probabilities, ids of the most likely tokens, their log-probabilities) of
            every entry of ``tokens``, flattened; None if no row requests them.
        prompt_logprobs: log-probabilities of prompt tokens that the step computed.
        drafts: number of drafts of each decoding row, int32 [D]; None: all have as many.
        next_drafts: number of drafts that each row has for its next step, int32 [B], at least 1 if
            a grammar forces tokens there; None: not known.
    """

    tokens: NDArray[np.int64]
    counts: NDArray[np.int32]
    bad: NDArray[np.bool_]
    logprobs: tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]] | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    drafts: NDArray[np.int32] | None = None
    next_drafts: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class StepShape:
    """The properties of a step on which ranks agree before it.

    Attributes:
        mode: the mode.
        rows: largest number of rows on any rank.
        tokens: largest number of tokens on any rank.
        load: number of sequences that run or wait. In the argument of ``agree`` it counts those
            of this rank's group, in the result those of all groups (0 without groups). Steps in
            flight need not be counted, because ranks launch together.
        pending: prompt tokens that are not computed yet; counted like ``load``.
        context: tokens in the KV cache that running sequences use; counted like ``load``.
        free: tokens for which pages of the KV cache are free or can be evicted; counted like
            ``load``.
        decodes: largest number of decoding rows on any rank.
        group_tokens: number of tokens of each group, in the result of ``agree``; () without groups.
        group_decodes: number of decoding rows of each group; () without groups.
        draft_shape: largest size of the drafts on any rank; None: the plan's, or no rank has
            decoding rows. All groups use it, see ``widen``.
        failed: requests of this rank's group that failed calls of components have ended, in the
            argument of ``agree``; 0 without groups.
    """

    mode: Mode
    rows: int
    tokens: int
    load: int = 0
    pending: int = 0
    context: int = 0
    free: int = 0
    decodes: int = 0
    group_tokens: tuple[int, ...] = ()
    group_decodes: tuple[int, ...] = ()
    draft_shape: DraftShape | None = None
    failed: int = 0


NO_WORK = StepShape(Mode.IDLE, 0, 0)  #: shape of a step without rows


def shape_of(batch: Batch | None) -> StepShape:
    """Return the shape of a rank's own batch, before the agreement."""
    if batch is None:
        return NO_WORK
    return StepShape(
        batch.mode,
        batch.num_rows,
        batch.num_tokens,
        decodes=batch.num_decodes,
        draft_shape=batch.draft_shape,
    )


def idle_batch(step: int = 0) -> Batch:
    """Return a batch without rows. ``step``: number of the step.

    A rank without work runs it, so that it takes part in the other ranks' collectives.
    """
    none = np.zeros(0, np.int32)
    return Batch(
        step=step,
        mode=Mode.IDLE,
        rows=none,
        epochs=np.zeros(0, np.int64),
        num_decodes=0,
        query_lens=none,
        kv_lens=none,
        samples=np.zeros(0, np.bool_),
        prompt_ids=none,
        pages=np.zeros((0, 1), np.int32),
    )
