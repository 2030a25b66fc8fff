"""A draft's pass over the tokens of a step with prompts in it, replayed whole.

It keeps each token by itself and attends to none, so that it is one graph of a padded number of
tokens. Those behind the step's own go to the scratch page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from glowplug.core.step.graph_pieces import ExtendWork, Extension
from glowplug.plugins.graphs.capture.prefill_graph import Tape


class ExtendMemory:
    """What every graph begins with, for up to ``tokens`` tokens; those of fewer use the first ones."""

    def __init__(self, work: ExtendWork, tokens: int, device: torch.device) -> None:
        self._places = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        self._ids, self._positions, self._slots = self._places
        self._previous = torch.zeros(tokens, work.hidden, dtype=work.dtype, device=device)
        self._live = 0  # tokens before it are of the last step, those from it on are zero

    def first(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As ``ExtendWork.extend`` takes them."""
        return (
            self._ids[:tokens],
            self._positions[:tokens],
            self._slots[:tokens],
            self._previous[:tokens],
        )

    def fill(
        self, ids: Tensor, positions: Tensor, slots: Tensor, hidden: Tensor, source: Tensor
    ) -> None:
        """As ``Extension.call`` is given them. Enqueued, without waiting for the device."""
        live = len(ids)
        self._ids[:live].copy_(ids)
        self._positions[:live].copy_(positions)
        self._slots[:live].copy_(slots)
        torch.index_select(hidden, 0, source, out=self._previous[:live])
        if live < self._live:
            self._places[:, live : self._live].zero_()
            self._previous[live : self._live].zero_()
        self._live = live


class Extends:
    """All captured passes of a draft, by their number of tokens; called like ``Extension.call``."""

    def __init__(self) -> None:
        self._extension: Extension | None = None
        self._replays: dict[int, Callable[[], None]] = {}
        self._counts: list[int] = []

    def capture(
        self,
        extension: Extension,
        counts: tuple[int, ...],
        device: torch.device,
        tape: Tape,
        failed: Callable[[Exception, int], None],
        report: Callable[[int], None],
    ) -> None:
        """The largest first. ``failed`` hears of one that cannot be captured, and may raise;
        ``report`` how many are done."""
        work = extension.work
        if work is None or not counts:
            return
        self._memory = ExtendMemory(work, max(counts), device)
        self._eager = work.extend
        for done, tokens in enumerate(sorted(counts, reverse=True)):
            report(done)
            try:
                self._replays[tokens] = _captured(work, self._memory.first(tokens), tape)
            except Exception as error:
                failed(error, tokens)
        self._counts = sorted(self._replays)
        self._extension = extension
        extension.taker = self

    def __call__(
        self, ids: Tensor, positions: Tensor, slots: Tensor, hidden: Tensor, source: Tensor
    ) -> None:
        tokens = len(ids)
        if not tokens or tokens > max(self._counts, default=0):
            self._eager(ids, positions, slots, hidden[source])
            return
        self._memory.fill(ids, positions, slots, hidden, source)
        self._replays[self._counts[bisect_left(self._counts, tokens)]]()

    @property
    def counts(self) -> list[int]:
        return self._counts

    def release(self) -> None:
        """Calls go through again."""
        if self._extension is not None:
            self._extension.taker = None


def _captured(
    work: ExtendWork, tokens: tuple[Tensor, Tensor, Tensor, Tensor], tape: Tape
) -> Callable[[], None]:
    pieces, _ = tape.record(lambda: work.extend(*tokens))
    (piece,) = pieces
    piece()  # the first launch of a graph takes longer
    return piece
