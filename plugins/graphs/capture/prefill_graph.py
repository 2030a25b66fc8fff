"""Piecewise graphs of the model's forward pass over a prefill step.

A pass is captured for a number of tokens, T, in pieces. Each piece ends where a layer calls
attention (a split point, see ``core.step.graph_pieces.SplitPoints``), and the next one begins
after it. A step of n <= T tokens fills fixed memory, replays the first piece, runs attention
eagerly for its n tokens, replays the next piece, and so on. The padding rows after the n tokens
hold token 0 at position 0 and KV slot 0, and zeros as the result of attention, so that no values of
other steps remain in them. Their results are never read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Steps
from glowplug.core.step.batch import Batch, Padding, StepShape
from glowplug.core.step.graph_pieces import SplitCall

T = TypeVar("T")


class Tape(Protocol):
    """Recorder that captures a forward pass as pieces between its split points.

    The captured results do not own their memory: the replay of another pass may overwrite them, and
    a later piece of the same pass may overwrite the rows given to a split point.
    """

    def record(self, work: Callable[[], T]) -> tuple[list[Callable[[], None]], T]:
        """Run ``work`` once, so that first-use costs are not captured, then capture it.

        Returns:
            Functions that replay the pieces between the split points, in order, and the results of
            ``work``.
        """
        ...

    def split(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """End the piece being captured, at a split point within ``work``, and begin the next piece.

        Returns:
            Tensors that a replay of the piece fills with ``rows``; None while nothing is captured.
        """
        ...


class PassMemory:
    """Buffers of ``tokens`` rows for the inputs of all passes and for results of split points.

    Passes of fewer tokens use the first rows.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._tokens = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        self.ids, self.positions, self.kv_slots = self._tokens
        self.padding = torch.ones(tokens, 1, dtype=torch.bool, device=device)
        self._results: dict[tuple[int, torch.dtype], Tensor] = {}
        self._live = 0  # number of rows of the last step; later rows are zero

    def result(self, like: Tensor, width: int) -> Tensor:
        """Return the buffer [tokens, width] for results of split points.

        It has the dtype and device of ``like``.
        """
        key = width, like.dtype
        if key not in self._results:
            self._results[key] = torch.zeros(
                self._tokens.shape[1], width, dtype=like.dtype, device=like.device
            )
        return self._results[key]

    def fill(self, ids: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        """Copy the tokens' ids, positions and KV slots, int64 [n] each, and zero the rest.

        The copies are enqueued without waiting for the device.
        """
        live = len(ids)
        self.ids[:live].copy_(ids)
        self.positions[:live].copy_(positions)
        self.kv_slots[:live].copy_(kv_slots)
        if live > self._live:
            self.padding[self._live : live] = False
        if live < self._live:
            self.padding[live : self._live] = True
            self._tokens[:, live : self._live].zero_()
            for result in self._results.values():
                result[live : self._live].zero_()
        self._live = live


@dataclass(frozen=True)
class _Call:
    """One split point of a captured pass.

    Attributes:
        work: The call that runs eagerly.
        rows: Arguments of ``work``, which the piece before the split point writes.
        result: Buffer [T, width] for the result of ``work``, which the piece after the split point
            reads.
    """

    work: SplitCall
    rows: tuple[Tensor, ...]
    result: Tensor

    def __call__(self, live: int) -> None:
        self.result[:live].copy_(self.work(*[rows[:live] for rows in self.rows]))


class Pass:
    """A captured prefill pass of ``tokens`` tokens, called like ``Steps.forward``.

    A call may have fewer tokens, but not more.

    Args:
        tokens: Most tokens of a call.
        memory: Buffers of all passes.
        tape: Recorder of the pieces.
        groups: Number of groups of ranks whose padding is marked; 0: padding is not marked.
    """

    def __init__(self, tokens: int, memory: PassMemory, tape: Tape, groups: int) -> None:
        self.tokens = tokens
        self._memory = memory
        self._tape = tape
        self._ids = memory.ids[:tokens]
        self._positions = memory.positions[:tokens]
        self._calls: list[_Call] = []
        self._pieces: list[Callable[[], None]] = []
        self._batch = _batch_of(tokens)
        self._marks: Tensor | None = None
        self._live = (0,) * groups  # tokens of each group that are not padding
        if groups:
            own = memory.padding[:tokens]
            self._marks = own if groups == 1 else torch.ones_like(own).repeat(groups, 1)
            self._batch.padding = Padding(own, self._marks)

    def capture(self, steps: Steps) -> None:
        """Capture the pass and replay each piece once, because a graph's first launch is slower."""
        self._pieces, self._hidden = self._tape.record(partial(self._forward, steps))
        if len(self._pieces) != len(self._calls) + 1:
            raise RuntimeError(
                f"captured {len(self._pieces)} pieces for {len(self._calls)} split points"
            )
        for piece in self._pieces:
            piece()

    def _forward(self, steps: Steps) -> Tensor:
        steps.split_points.replacement = self._take
        steps.split_points.kv_slots = self._memory.kv_slots[: self.tokens]
        try:
            return steps.forward(self._ids, self._positions, self._batch)
        finally:
            steps.split_points.replacement = None
            steps.split_points.kv_slots = None

    def _take(self, work: SplitCall, rows: tuple[Tensor, ...], width: int) -> Tensor:
        """End the current graph at a split point, and record the call there for replays.

        Args:
            work: the call at the split point, which runs eagerly between two graphs.
            rows: arguments of ``work``, [tokens, ...] each.
            width: number of columns of the call's result.

        Returns:
            The buffer [tokens, width] into which the call writes its result.
        """
        result = self._memory.result(rows[0], width)[: self.tokens]
        kept = self._tape.split(rows)
        if kept is not None:
            self._calls.append(_Call(work, kept, result))
        return result

    @property
    def split_points(self) -> int:
        """Number of split points captured so far."""
        return len(self._calls)

    def __call__(self, ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        live = len(ids)
        pieces = iter(self._pieces)
        self._memory.fill(ids, positions, batch.kv_slots)
        if len(self._live) > 1 and batch.agreed is not None:
            self._mark(batch.agreed.group_tokens or (live,) * len(self._live))
        next(pieces)()
        for call, piece in zip(self._calls, pieces):
            call(live)
            piece()
        return self._hidden[:live]

    def _mark(self, tokens: tuple[int, ...]) -> None:
        """Mark the tokens after the first ``tokens[g]`` of each group g as padding."""
        assert self._marks is not None, "several groups have marks"
        for marks, now, before in zip(self._marks.chunk(len(tokens)), tokens, self._live):
            if now > before:
                marks[before:now] = False
            elif now < before:
                marks[now:before] = True
        self._live = tokens


class Passes:
    """All captured prefill passes, by their number of tokens."""

    def __init__(self) -> None:
        self._passes: dict[int, Pass] = {}
        self._counts: list[int] = []

    def capture(
        self,
        steps: Steps,
        counts: tuple[int, ...],
        tape: Tape,
        failed: Callable[[Exception, Pass], None],
        report: Callable[[int], None],
        groups: int = 0,
    ) -> None:
        """Capture passes for ``counts`` tokens, the largest first.

        Args:
            steps: The engine's steps.
            counts: Token counts.
            tape: Recorder that captures a pass.
            failed: Called with the error and the pass when a capture fails; may raise.
            report: Called with the number of passes captured so far.
            groups: Number of groups of ranks whose padding is marked; 0: padding is not marked.
        """
        memory = PassMemory(max(counts, default=0), torch.device(steps.device))
        for done, tokens in enumerate(sorted(counts, reverse=True)):
            report(done)
            made = Pass(tokens, memory, tape, groups)
            try:
                made.capture(steps)
            except Exception as error:
                failed(error, made)
                continue
            self._passes[tokens] = made
        self._counts = sorted(self._passes)

    def find(self, batch: Batch) -> Pass | None:
        """Return the smallest pass that holds the tokens of ``batch``; None if there is none.

        Ranks that agreed on a step get passes of the same size.
        """
        tokens = batch.num_tokens if batch.agreed is None else batch.agreed.tokens
        if not 0 < tokens <= (self._counts[-1] if self._counts else 0):
            return None
        return self._passes[self._counts[bisect_left(self._counts, tokens)]]

    @property
    def counts(self) -> list[int]:
        """Captured token counts, ascending."""
        return self._counts


def _batch_of(tokens: int) -> Batch:
    """Return the batch that layers see during a capture; only its token counts are meaningful."""
    lens = np.full(1, tokens, np.int32)
    return Batch(
        step=0,
        mode=Mode.PREFILL,
        rows=np.zeros(1, np.int32),
        epochs=np.zeros(1, np.int64),
        num_decodes=0,
        query_lens=lens,
        kv_lens=lens,
        samples=np.ones(1, np.bool_),
        prompt_ids=np.zeros(tokens, np.int32),
        pages=np.zeros((1, 1), np.int32),
        agreed=StepShape(Mode.PREFILL, 1, tokens),
    )
