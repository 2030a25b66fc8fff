"""A step's batch and its result. The scheduler builds it, the runner completes it, the model only
reads it.

Order of rows: decoding rows first (``width`` tokens each), then prefill rows (a chunk each). Tokens
are flattened in row order. B rows, T tokens, D decoding rows, W = width, P = pages of the longest
row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.offers import Mode
from glowplug.core.step.graph_pieces import DIRECT, Segments
from glowplug.core.step.request import Sequence

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Batch:
    """One step. Fields above the line are set by the scheduler (host), below it by the runner
    (device).
    """

    step: int
    mode: Mode
    rows: NDArray[np.int32]  #: [B] rows of the sequence table
    epochs: NDArray[
        np.int64
    ]  #: [B] row epochs at scheduling; a row whose epoch moved on is stale at commit
    num_decodes: int  #: D
    query_lens: NDArray[np.int32]  #: [B] tokens computed in this step
    kv_lens: NDArray[
        np.int32
    ]  #: [B] cache length after this step (an upper bound while lengths live on the device)
    samples: NDArray[
        np.bool_
    ]  #: [B] the row yields a token (False: a chunk that does not end its prompt)
    prompt_ids: NDArray[np.int32]  #: tokens of the prefill rows, flattened
    pages: NDArray[np.int32]  #: [B, P] page numbers, 0 (scratch) where unused
    joined: list[Sequence] = field(default_factory=list)  #: entered a row since the last batch
    left: list[int] = field(default_factory=list)  #: rows given up since the last batch
    next_ids: NDArray[np.int32] | None = (
        None  #: [B - D] token after each chunk; 0 where the chunk ends its prompt
    )
    resumed: NDArray[np.bool_] | None = (
        None  #: [B - D] the row's first chunk, and it begins behind a cached prefix
    )
    prompt_logprobs: NDArray[np.bool_] | None = (
        None  #: [B] log-probabilities of the chunk's own tokens are wanted
    )
    agreed: StepShape | None = (
        None  #: set by the engine: what ``ParallelStrategy.agree`` said for this step
    )
    #: keys of the longest row in any step that replays this one's pieces; 0: ``Sizes.positions``
    longest: int = 0
    first_key: int = (
        0  #: cache positions before it hold nothing and are never attended to (a draft's batch: 1)
    )
    segments: Segments = (
        DIRECT  #: how the pieces of this step are run: as they come, or replayed from graphs
    )
    # ---- set by the runner -----------------------------------------------------------------------
    input_ids: Any = None  #: torch int64 [T]
    positions: Any = None  #: torch int64 [T]
    slots: Any = None  #: torch int64 [T] where each token's KV goes: page * page_size + offset
    row_ids: Any = None  #: torch int64 [B]
    kv_lens_device: Any = None  #: torch int32 [B]
    query_starts: Any = None  #: torch int32 [B + 1] prefix sums of query_lens
    page_table: Any = None  #: torch int32 [B, P]
    tree_mask: Any = (
        None  #: torch int64 [D, W]: bit j of a token: it sees its row's own token j; None: causal
    )
    logits_index: Any = (
        None  #: torch int64 [N] tokens whose logits are wanted, or None: all of them
    )
    ends: Ends | None = (
        None  #: tokens at ``logits_index`` as a step of their own: what goes through the last layer
    )
    extra: dict[str, Any] = field(
        default_factory=dict
    )  #: parallel and speculative plugins' own fields, by plugin

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decoding rows, which lead the flattened order."""
        return int(self.query_lens[: self.num_decodes].sum())


@dataclass(eq=False)
class Ends:
    """The tokens of a step that are sampled from, for the last layer.

    Attributes:
        count: N of them; what lies behind in the others only fills up.
        tokens: int64 [E] where they stand among the step's.
        batch: they as E rows that decode one token each, complete but for ``input_ids`` and
            ``row_ids``.
    """

    count: int
    tokens: torch.Tensor
    batch: Batch


@dataclass(eq=False)
class LogprobTensors:
    """Device log-probabilities of N tokens: ``token`` float32 [N], ``top_ids`` int64 and ``top``
    float32 [N, K].
    """

    token: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass(eq=False)
class Accepted:
    """What a step yields, on the device. Made by ``SpeculativeAlgorithm.accept``.

    Attributes:
        tokens: int64 [B, W]; row i holds ``counts[i]`` valid tokens.
        counts: int32 [B]; 0 for rows that do not sample.
        bad: bool [B]; the row's logits held NaN or only -inf.
        logprobs: for every entry of ``tokens`` flattened ([B * W]), or None when no row asked.
        packed: uint8, tokens, counts and bad one behind another, where the runner has put them so
            for one copy.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    bad: torch.Tensor
    logprobs: LogprobTensors | None = None
    packed: torch.Tensor | None = None


@dataclass(eq=False)
class PromptLogprobs:
    """Log-probabilities of prompt tokens of one row: ``start`` is the position of the first."""

    row: int
    start: int
    token: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float32]


@dataclass(eq=False)
class StepResult:
    """The same on the host, as the scheduler commits it. Shapes as in :class:`Accepted`."""

    tokens: NDArray[np.int64]
    counts: NDArray[np.int32]
    bad: NDArray[np.bool_]
    logprobs: tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]] | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class StepShape:
    """What ranks agree on before a step: the mode, the most rows and tokens of any rank, and the
    load.

    ``load``: sequences running or waiting, of this rank's group when it goes into ``agree``, of all
    groups when it comes out (0 without groups). Ranks launch together, so a step in flight is known
    without it.
    """

    mode: Mode
    rows: int
    tokens: int
    load: int = 0


NO_WORK = StepShape(Mode.IDLE, 0, 0)


def shape_of(batch: Batch | None, load: int = 0) -> StepShape:
    """A rank's own part in the agreement."""
    if batch is None:
        return StepShape(Mode.IDLE, 0, 0, load)
    return StepShape(batch.mode, batch.num_rows, batch.num_tokens, load)


def idle_batch(step: int = 0) -> Batch:
    """No row, no token: what a rank without work runs so that the others' collectives find it."""
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
