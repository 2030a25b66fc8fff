"""Passes of the model over a step with prompts in it, replayed in pieces.

A pass is captured for a number of tokens, T, in pieces: each ends where a layer calls attention (a
cut, see ``core.segments.Cuts``) and the next begins behind it. A step of n <= T tokens fills fixed
memory, replays the first piece, calls attention for its own n tokens as they are, replays the next,
and so on. Rows behind the n are token 0 at position 0, for which attention yields zeros: no number
of another step comes into them, and nobody reads what comes out.
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
from glowplug.core.step.batch import Batch
from glowplug.core.step.graph_pieces import Cut

T = TypeVar("T")


class Tape(Protocol):
    """How a pass becomes pieces. What it returns has no claim on its memory: another pass's replay
    may write over it, and a later piece of the same over what a cut was given."""

    def record(self, work: Callable[[], T]) -> tuple[list[Callable[[], None]], T]:
        """Run ``work`` for first-use costs, then capture it: calls that replay what lies between
        its cuts, to be called in turn, and its results."""
        ...

    def cut(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Within ``work``: one piece ends and the next begins. ``rows`` as a replay leaves them
        behind; None while nothing is captured."""
        ...


class PassMemory:
    """What every pass reads and cuts leave behind, for up to ``tokens`` tokens; passes of fewer use
    the first rows.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._tokens = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        self.ids, self.positions = self._tokens
        self._results: dict[tuple[int, torch.dtype], Tensor] = {}
        self._live = 0  # rows before it are of the last step, those from it on are zero

    def result(self, like: Tensor, width: int) -> Tensor:
        """Where every cut of this width and of ``like``'s dtype leaves its result: [tokens, width]."""
        key = width, like.dtype
        if key not in self._results:
            self._results[key] = torch.zeros(
                self._tokens.shape[1], width, dtype=like.dtype, device=like.device
            )
        return self._results[key]

    def fill(self, ids: Tensor, positions: Tensor) -> None:
        """int64 [n] each. Enqueued, without waiting for the device."""
        live = len(ids)
        self.ids[:live].copy_(ids)
        self.positions[:live].copy_(positions)
        if live < self._live:
            self._tokens[:, live : self._live].zero_()
            for result in self._results.values():
                result[live : self._live].zero_()
        self._live = live


@dataclass(frozen=True)
class _Call:
    """One cut: ``rows`` as the piece before it leaves them, ``result`` [T, width] as the piece
    behind it reads it.
    """

    work: Cut
    rows: tuple[Tensor, ...]
    result: Tensor

    def __call__(self, live: int) -> None:
        self.result[:live].copy_(self.work(*[rows[:live] for rows in self.rows]))


class Pass:
    """A captured pass of ``tokens`` tokens; called like ``Steps.forward`` with as many at most."""

    def __init__(self, tokens: int, memory: PassMemory, tape: Tape) -> None:
        self.tokens = tokens
        self._memory = memory
        self._tape = tape
        self._ids = memory.ids[:tokens]
        self._positions = memory.positions[:tokens]
        self._calls: list[_Call] = []
        self._pieces: list[Callable[[], None]] = []
        self._batch = _batch_of(tokens)

    def capture(self, steps: Steps) -> None:
        self._pieces, self._hidden = self._tape.record(partial(self._forward, steps))
        if len(self._pieces) != len(self._calls) + 1:
            raise RuntimeError(f"{len(self._pieces)} pieces around {len(self._calls)} cuts")
        for piece in self._pieces:  # the first launch of a graph takes longer
            piece()

    def _forward(self, steps: Steps) -> Tensor:
        steps.cuts.taker = self._take
        try:
            return steps.forward(self._ids, self._positions, self._batch)
        finally:
            steps.cuts.taker = None

    def _take(self, work: Cut, rows: tuple[Tensor, ...], width: int) -> Tensor:
        result = self._memory.result(rows[0], width)[: self.tokens]
        kept = self._tape.cut(rows)
        if kept is not None:
            self._calls.append(_Call(work, kept, result))
        return result

    @property
    def cuts(self) -> int:
        """Cuts captured so far."""
        return len(self._calls)

    def __call__(self, ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        live = len(ids)
        pieces = iter(self._pieces)
        self._memory.fill(ids, positions)
        next(pieces)()
        for call, piece in zip(self._calls, pieces):
            call(live)
            piece()
        return self._hidden[:live]


class Passes:
    """All captured passes, by their number of tokens."""

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
    ) -> None:
        """The largest first. ``failed`` hears of one that cannot be captured, and may raise;
        ``report`` how many are done."""
        memory = PassMemory(max(counts, default=0), torch.device(steps.device))
        for done, tokens in enumerate(sorted(counts, reverse=True)):
            report(done)
            made = Pass(tokens, memory, tape)
            try:
                made.capture(steps)
            except Exception as error:
                failed(error, made)
                continue
            self._passes[tokens] = made
        self._counts = sorted(self._passes)

    def find(self, tokens: int) -> Pass | None:
        """The smallest pass of at least so many tokens."""
        if not 0 < tokens <= (self._counts[-1] if self._counts else 0):
            return None
        return self._passes[self._counts[bisect_left(self._counts, tokens)]]

    @property
    def counts(self) -> list[int]:
        return self._counts


def _batch_of(tokens: int) -> Batch:
    """What layers may know of the step while a pass is captured: how many tokens it has."""
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
    )
