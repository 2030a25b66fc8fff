"""What each slot's runtime object must do. A handful of methods each; made by ``factory(options, plan, worker)``.

``reserve`` (allocate every persistent buffer; a device's memory is measured between two calls, and the second, of other
``num_pages`` and ``kv``, replaces the first), ``plan_step`` (host work and copies, never captured) and the device-only
methods mean the same in every slot. Shapes: B rows, T tokens, D decoding rows, W width, H heads,
V vocabulary. What layers call is in ``core/layer_protocols.py``. Importing this module imports torch only for type
checking.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from glowplug.core.batch import Accepted, Batch, LogprobTensors, StepResult, StepShape
from glowplug.core.facts import ModelFacts, TensorFact
from glowplug.core.layer_protocols import (
    AttentionBackend as AttentionBackend,
    ExpertsMethod as ExpertsMethod,
    ExpertsShape as ExpertsShape,
    Limits as Limits,
    LinearMethod as LinearMethod,
    LinearShape as LinearShape,
    MhaLayer as MhaLayer,
    MlaLayer as MlaLayer,
    Ops as Ops,
    Parts as Parts,
    ProjectedMla as ProjectedMla,
    QuantizationScheme as QuantizationScheme,
    Quantized as Quantized,
    RopeRows as RopeRows,
    Route as Route,
    StartedExperts as StartedExperts,
    WeightTarget as WeightTarget,
    Worker as Worker,
)
from glowplug.core.memory.allocator import PageAllocator
from glowplug.core.messages import Abort, Stats, StepOutput
from glowplug.core.offers import Mode
from glowplug.core.plan import EnginePlan
from glowplug.core.request import SamplingParams, Sequence
from glowplug.core.rows import SequenceTable
from glowplug.core.segments import Cuts

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.build import BuildContext


# ---- parallel -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """A rank's part of a dimension: elements ``start`` to ``start + size`` of ``full``.

    ``reduce``: the layer's output is a partial sum that must be all-reduced. ``gather``: it is a slice to be gathered.
    ``axis``: the mesh axis to do either over (``core/mesh.py`` names them). ``parts``: ranks that share the dimension;
    a part that is to be gathered is filled up to ceil(full / parts) first.
    """

    start: int
    size: int
    full: int
    reduce: bool = False
    gather: bool = False
    axis: str = "tp"
    parts: int = 1


class ExpertExchange(Protocol):
    """Moves one layer's tokens to the ranks of their experts and back. Each step calls each method once, in turn.

    Attributes:
        load: int64 [experts], on the device: how many tokens chose each expert so far. Over the ranks of a group every
            token is counted once, padding never. None: nobody counts.
    """

    load: Tensor | None

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's attention tokens x [T, hidden], ids int64 and weights float32 [T, K] -> the same of the M tokens
        that this rank's experts work on; ids are local expert numbers, -1 where the expert is elsewhere."""
        ...

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        """This rank's (partial) results y [M, hidden] -> the complete results [T, hidden] of its attention tokens.

        ``partial`` [T, hidden] is this rank's term of a sum over "attn_tp" (the shared expert's), added to the result.
        Both may be overwritten.
        """
        ...


class RequestRouter(Protocol):
    """Which group of ranks runs a request. Ranks of a group share a scheduler's decisions and hold the same pages.

    Attributes:
        group: number of this rank's group.
        leads: this rank reports its group's outputs to the front.
    """

    group: int
    leads: bool

    def owns(self, sequence: Sequence) -> bool:
        """Does this rank's group run ``sequence``? Asked on every rank, in the same order, once for each Submit.

        Every rank must come to the same assignment, so it may use only what all ranks know (``agree``'s loads).
        """
        ...


class ParallelStrategy(Protocol):
    """One way to share the work among ranks. Several are composed by ``core/parallel_stack.py``."""

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard | None:
        """This rank's part of dimension ``full`` of layer ``name``; None: what the strategies before this one say.

        ``role``: "column" (outputs), "row" (inputs), "vocab", "heads", "experts", "expert_width", "replicated".
        ``block``: the dimension splits only at multiples of it (128 for block FP8).
        """
        ...

    def agree(self, local: StepShape) -> StepShape:
        """The one host collective a step; identity unless ranks may differ. A rank without work says IDLE."""
        ...

    def router(self) -> RequestRouter | None:
        """Deals requests among groups of ranks, the same object each call. None: all run all, and rank 0 answers."""
        ...

    def enter_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """After an MLP: x [T', hidden], the tokens MLPs work on -> [T, hidden], this rank's attention tokens."""
        ...

    def leave_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """Before an MLP, already normed: this rank's attention tokens -> the tokens MLPs work on."""
        ...

    def expert_exchange(self, name: str, experts: int) -> ExpertExchange | None:
        """The exchange of the mixture ``name`` of ``experts`` experts; None: its tokens need not move.

        With one, the layer gets this rank's own attention tokens, and its shared expert's "column" and "row" are split
        over "attn_tp" at most.
        """
        ...


class Collectives(Protocol):
    """Collectives over one mesh axis: among the ranks that differ only in it. Identity for an axis of size one.

    A peer that has gone or does not answer within ``collectives.timeout`` is a ``CollectiveError``.
    """

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        """The sum over the axis, bitwise the same on each of its ranks. May be computed in place.

        On the CPU a row's bits do not depend on the rows around it.
        """
        ...

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        """Equal shapes from every rank of the axis, side by side along ``dim`` in rank order."""
        ...

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """x [size * N, ...] -> this rank's N rows of the sum."""
        ...

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        """x [size, N, ...]: part i goes to rank i of the axis; returned part i came from rank i."""
        ...

    def all_to_all_rows(self, x: Tensor, counts: Seq[int], received: Seq[int], axis: str) -> Tensor:
        """x [sum(counts), ...]: the next counts[i] rows go to rank i; returns [sum(received), ...] likewise.

        Row counts are the host's, so this is never captured.
        """
        ...

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank (host side)."""
        ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes on every rank, by rank (host side; for rare things)."""
        ...

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """values int64 [N] -> [ranks, N] on every rank (host side, one small collective: ``agree`` uses it)."""
        ...

    def close(self) -> None: ...


# ---- sampling and speculation -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sampled:
    """One token for each of N logits rows: ``tokens`` int64 [N], ``bad`` bool [N], optional log-probabilities."""

    tokens: Tensor
    bad: Tensor
    logprobs: LogprobTensors | None = None


class Sampler(Protocol):
    """Turns logits into tokens by each row's own parameters, independent of what else is in the batch."""

    def reserve(self, limits: Limits) -> None: ...

    def join(
        self, row: int, params: SamplingParams, tokens: NDArray[np.int32], prompt_len: int, stop_ids: frozenset[int]
    ) -> None:
        """A sequence takes ``row``: tokens so far (prompt and output) seed the penalties.

        ``stop_ids`` end it, so they cannot be drawn before ``params.min_tokens`` output tokens.
        """
        ...

    def leave(self, row: int) -> None: ...

    def plan_step(self, batch: Batch) -> None: ...

    def capture_key(self) -> str | None:
        """What ``sample`` and ``observe`` do in the step just planned, in a word: a step with the same word and shapes
        may replay its kernels. None: they depend on more than that (asked only where steps are replayed)."""
        ...

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None) -> Sampled:
        """logits float32 [N, V] (may be overwritten), rows int64 [N], positions int64 [N] of the token being drawn;
        rows and positions may be strided, also by 0.

        The random number depends only on (seed of the row, position). ``ahead`` int64 [N, W - 1]: tokens that precede
        this one and have not been observed yet (drafts being verified), -1 where there is none; penalties count them.
        """
        ...

    def observe(self, tokens: Tensor, counts: Tensor, rows: Tensor) -> None:
        """tokens int64 [B, W], counts int32 [B], rows int64 [B] were accepted: update penalties, on the device."""
        ...


class SpeculativeAlgorithm(Protocol):
    """Decides what decoding rows feed in and which of the results count. Width one is no speculation."""

    def width(self) -> int: ...

    def reserve(self, limits: Limits) -> None: ...

    def lengths(self, batch: Batch) -> Tensor | None:
        """int32 [D]: tokens of each decoding row whose cache entries are in place, on the device.

        None: the host's ``kv_lens`` are exact (width one). Otherwise they are upper bounds, and the runner places the
        step's tokens by these.
        """
        ...

    def draft(self, batch: Batch) -> Tensor:
        """Token ids int64 [D, W] that the decoding rows of ``batch`` compute: the last accepted one, then drafts.

        Called for every step, with D 0 as well, so that ranks may take part in each other's drafting. ``batch`` is
        complete but for ``input_ids``; on a device, positions and lengths are still the host's upper bounds. With a
        width above one, device work goes through ``batch.segments``; otherwise it is part of the target's pass.
        """
        ...

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        """logits [N, V] at ``batch.logits_index``, hidden [T, hidden]. Remembers what the next ``draft`` needs."""
        ...

    def draft_model(self, context: BuildContext, family: ModelFamily, target: Model) -> Model | None:
        """The draft model with empty weights, or None. Called once, before ``reserve``; the engine loads it.

        ``context`` is the target's, with ``first_layer`` the KV-pool number of the first layer behind the target's and,
        when the draft lies in a folder of its own, ``facts`` that folder's. The draft runs inside ``draft`` and
        ``accept``; the latter sees every step's hidden states, prompts' included.
        """
        ...


# ---- scheduling ---------------------------------------------------------------------------------------------------


class PrefixCache(Protocol):
    """Remembers the pages of finished prefixes. Works in whole pages; tokens int32."""

    shares: bool  #: False: ``match`` never finds anything, so callers may spare themselves the work

    def match(self, tokens: NDArray[np.int32], salt: str) -> PrefixMatch:
        """Longest cached prefix of ``tokens`` (whole pages) under ``salt``."""
        ...

    def insert(self, tokens: NDArray[np.int32], pages: NDArray[np.int32], salt: str) -> NDArray[np.int32]:
        """Take ownership of ``pages`` (covering ``tokens``, whole pages). Returns the pages it did not need."""
        ...

    def lock(self, match: PrefixMatch, delta: int) -> None:
        """Pin (+1) or unpin (-1) a match against eviction."""
        ...

    def evict(self, pages: int) -> NDArray[np.int32]:
        """Give up at least ``pages`` pages if possible, least recently used leaves first. Returns them."""
        ...

    def size(self) -> tuple[int, int]:
        """(pages held, pages evictable)."""
        ...

    def check_integrity(self) -> None:
        """AssertionError with what is wrong."""
        ...


@dataclass(eq=False)
class PrefixMatch:
    """``length`` tokens found in ``pages``; ``handle`` is the cache's own."""

    length: int
    pages: NDArray[np.int32]
    handle: object = None


class SchedulingPolicy(Protocol):
    """Pure choices; no state of its own."""

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        """Waiting sequences in the order they should be admitted. ``cached``: id -> prefix-cache tokens."""
        ...

    def victim(self, running: Seq[Sequence]) -> Sequence:
        """Which running sequence loses its pages when none are free."""
        ...


class Scheduler(Protocol):
    """Host only; deterministic: every rank runs the same one on the same messages.

    ``next_batch`` may be called before the batch before has been committed; batches are committed in order.
    """

    def bind(self, table: SequenceTable, pages: PageAllocator, cache: PrefixCache, policy: SchedulingPolicy) -> None:
        """Called once, while the rank is assembled. The scheduler is the only writer of ``table`` and ``pages``."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Queue it. QueueFull or RequestError when it may not enter."""
        ...

    def abort(self, message: Abort) -> StepOutput | None:
        """End sequences now, freeing their pages; None when all ids were unknown."""
        ...

    def next_batch(self) -> Batch | None:
        """The next step. None: nothing to do, or nothing before the batches in flight are committed.

        With no batch in flight and a sequence waiting or running it is never None.
        """
        ...

    def commit(self, batch: Batch, result: StepResult) -> StepOutput:
        """Take in a step's tokens: append, finish, free. Stale rows are dropped."""
        ...

    def take_pending(self) -> StepOutput | None:
        """What happened outside ``commit`` (deadlines passed) and has not been reported by one; None: nothing."""
        ...

    def load(self) -> Stats: ...

    def flush(self) -> bool:
        """Drop the prefix cache; False when sequences are running."""
        ...

    def check(self) -> dict[str, int]:
        """Page accounting by owner; AssertionError with what is wrong."""
        ...


# ---- graphs, weights, models, outputs, executors ----------------------------------------------------------------


class Steps(Protocol):
    """What a graph runner captures: the ``Runner``'s device part of a step.

    Attributes:
        sampler: as the runner uses it.
        device: torch device it runs on.
        model: the target, whose pass may also be captured by itself.
        cuts: where such a pass is cut into pieces.
    """

    sampler: Sampler
    device: Any
    model: Model
    cuts: Cuts

    def step(self, batch: Batch) -> tuple[Accepted, Tensor]:
        """Run a batch whose device fields are filled in, piece by piece through ``batch.segments``: what it yields,
        and its hidden states [T, hidden]. ``Sampler.plan_step`` comes before it."""
        ...


class GraphRunner(Protocol):
    """Keeps slots: padded batches over fixed memory, with graphs of the pieces of their step; and passes of the model
    over a padded number of tokens, replayed in pieces between its cuts."""

    def shapes(self, plan: EnginePlan) -> list[tuple[Mode, int, int]]:
        """(mode, padded batch, width) to capture; passes alone are those of ``Sizes.pass_tokens``."""
        ...

    def capture(self, steps: Steps, report: Callable[[int, int], None]) -> None:
        """Capture every shape; ``report`` hears of (done, total). CaptureError when one fails."""
        ...

    def slot_for(self, batch: Batch) -> object | None:
        """The captured slot that can replay ``batch``, or None for an eager step. Ranks that agreed on a step get
        slots of the same shape."""
        ...

    def fill(self, slot: object, batch: Batch) -> Batch:
        """The slot's own batch, holding the rows of ``batch`` first and then padding; ready for ``Steps.step``."""
        ...

    def pass_for(self, batch: Batch) -> Callable[[Tensor, Tensor, Batch], Tensor] | None:
        """For a step that no slot replays: what stands for ``Model.forward`` in it, or None for that itself. Attention
        has planned the step as it is, and what comes back is valid until the next pass."""
        ...

    def close(self) -> None: ...


class WeightSource(Protocol):
    def open(self, facts: ModelFacts) -> None:
        """Preflight: every file complete, every header consistent. WeightError naming file and tensor."""
        ...

    def entries(self) -> Mapping[str, TensorFact]:
        """Every tensor it holds. Empty for a synthetic source, which makes whatever is asked."""
        ...

    def read(self, target: WeightTarget) -> Tensor:
        """The target's slice of its tensor, on the CPU, in the checkpoint's dtype."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class StreamingSource(WeightSource, Protocol):
    """A source that reads many targets faster than one by one."""

    def stream(self, targets: Seq[WeightTarget]) -> Iterator[tuple[WeightTarget, Tensor]]:
        """Each target once, in the order that reads fastest, with what ``read`` would return; on the rank's own device
        where the source can bring it there, ready for the current stream."""
        ...


class Model(Protocol):
    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """int64 [T], int64 [T] -> final hidden states [T, hidden] (normed)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, V]."""
        ...

    def targets(self) -> Iterator[WeightTarget]: ...

    def finalize(self) -> None: ...

    def ignored(self, name: str) -> bool:
        """May this checkpoint tensor be left unread (a NextN layer that is not used, rotary tables)?"""
        ...


class ModelFamily(Protocol):
    def build(self, context: BuildContext) -> Model:
        """The model with empty weights. No collective, no file access."""
        ...

    def build_nextn(self, context: BuildContext, target: Model, number: int = 0) -> Model:
        """Next-token layer ``number`` as a model of its own (``ModelOffers.nextn``); ``target`` is what ``build`` made.

        It shares what its checkpoint lacks (embedding, head) with ``target``. ``context.first_layer`` is the KV-pool
        number of the first next-token layer.
        """
        ...


@dataclass(frozen=True)
class Piece:
    """Parsed output: ``kind`` is "content", "reasoning" or "tool_call"; ``data`` holds a tool call's fields."""

    kind: str
    text: str
    data: Mapping[str, Any] | None = None


class OutputParser(Protocol):
    """Splits one generated text. One object a sequence, made by ``OutputParserFactory.start``."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class OutputParserFactory(Protocol):
    def start(self, prompt_tail: str, thinking: bool | None = None) -> OutputParser:
        """``prompt_tail``: the last characters of the rendered prompt (it may already hold the opening tag)."""
        ...


class Executor(Protocol):
    """Runs the ranks. The only object the front talks to; messages are bytes (see ``core/messages.py``).

    Attributes:
        leads: the front runs here. False: another host has it; here only call ``start``, then ``outputs`` until it
            raises.
    """

    leads: bool

    def start(self, plan: EnginePlan) -> None:
        """Spawn, load, warm up; returns when every rank is ready. EngineDead with rank, phase and reason otherwise."""
        ...

    def submit(self, data: bytes) -> None: ...

    def outputs(self, timeout: float | None) -> bytes | None:
        """Next frame from the engine, or None after ``timeout`` seconds.

        EngineDead when a rank has failed, with rank, phase and reason; EngineStopped after ``stop``.
        """
        ...

    def stop(self) -> None:
        """End every rank. Idempotent."""
        ...
