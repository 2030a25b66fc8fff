"""Graphs of a draft's pass over the tokens of a prefill step (draft extend).

The pass treats each token separately and runs no attention, so it is one graph for a padded number
of tokens. Padding tokens are written to the scratch page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from glowplug.core.step.graph_pieces import DraftExtend, ExtendWork
from glowplug.plugins.graphs.capture.prefill_graph import Tape


class ExtendMemory:
    """Input buffers of all draft-extend graphs, for up to ``tokens`` tokens.

    Graphs of fewer tokens use the first rows.
    """

    def __init__(self, work: ExtendWork, tokens: int, device: torch.device) -> None:
        self._places = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        self._ids, self._positions, self._kv_slots = self._places
        self._previous = torch.zeros(tokens, work.hidden, dtype=work.dtype, device=device)
        self._live = 0  # number of tokens of the last step; later rows are zero

    def first(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the first ``tokens`` rows of the inputs, as arguments of ``ExtendWork.extend``."""
        return (
            self._ids[:tokens],
            self._positions[:tokens],
            self._kv_slots[:tokens],
            self._previous[:tokens],
        )

    def fill(
        self, ids: Tensor, positions: Tensor, kv_slots: Tensor, hidden: Tensor, source: Tensor
    ) -> None:
        """Copy the arguments of ``DraftExtend.call`` into the input buffers and zero the rest.

        The copies are enqueued without waiting for the device.
        """
        live = len(ids)
        self._ids[:live].copy_(ids)
        self._positions[:live].copy_(positions)
        self._kv_slots[:live].copy_(kv_slots)
        torch.index_select(hidden, 0, source, out=self._previous[:live])
        if live < self._live:
            self._places[:, live : self._live].zero_()
            self._previous[live : self._live].zero_()
        self._live = live


class Extends:
    """All captured draft-extend graphs, by their number of tokens.

    Called like ``DraftExtend.call``.
    """

    def __init__(self) -> None:
        self._draft_extend: DraftExtend | None = None
        self._replays: dict[int, Callable[[], None]] = {}
        self._counts: list[int] = []

    def capture(
        self,
        draft_extend: DraftExtend,
        counts: tuple[int, ...],
        device: torch.device,
        tape: Tape,
        failed: Callable[[Exception, int], None],
        report: Callable[[int], None],
    ) -> None:
        """Capture graphs for ``counts`` tokens, the largest first, and install them.

        Args:
            draft_extend: The draft's pass; the graphs become its ``replacement``.
            counts: Token counts.
            device: Device of the graphs.
            tape: Recorder that captures a pass.
            failed: Called with the error and the token count when a capture fails; may raise.
            report: Called with the number of graphs captured so far.
        """
        work = draft_extend.work
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
        self._draft_extend = draft_extend
        draft_extend.replacement = self

    def __call__(
        self, ids: Tensor, positions: Tensor, kv_slots: Tensor, hidden: Tensor, source: Tensor
    ) -> None:
        tokens = len(ids)
        if not tokens or tokens > max(self._counts, default=0):
            self._eager(ids, positions, kv_slots, hidden[source])
            return
        self._memory.fill(ids, positions, kv_slots, hidden, source)
        self._replays[self._counts[bisect_left(self._counts, tokens)]]()

    @property
    def counts(self) -> list[int]:
        """Captured token counts, ascending."""
        return self._counts

    def release(self) -> None:
        """Remove the graphs from ``DraftExtend``, so that the draft's passes run eagerly again."""
        if self._draft_extend is not None:
            self._draft_extend.replacement = None


def _captured(
    work: ExtendWork, tokens: tuple[Tensor, Tensor, Tensor, Tensor], tape: Tape
) -> Callable[[], None]:
    """Capture ``work`` as one graph, replay it once, and return the function that replays it."""
    pieces, _ = tape.record(lambda: work.extend(*tokens))
    (piece,) = pieces
    piece()  # the first launch of a graph takes longer
    return piece
