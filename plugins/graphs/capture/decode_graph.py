"""A slot: one padded batch over fixed memory, and the graphs of the pieces of its step.

B rows, W tokens each, T = B * W. Rows behind the live ones repeat token 0 of a short sequence in
the scratch page, on the sequence table's spare row, and what they yield is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.plan.plan import Sizes
from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch, StepShape
from glowplug.plugins.graphs.capture.staging import Staging

T = TypeVar("T")
ALIGNED = 256  #: bytes at which each field begins
LONG = np.dtype(np.int64)
INT = np.dtype(np.int32)


class Recorder(Protocol):
    """How a piece becomes a graph."""

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Run ``work`` for first-use costs, then capture it: a call that replays it, and its
        results, valid already.
        """
        ...

    def loosen(self, results: T) -> T:
        """The same results without a claim on their memory: from now on another slot's replay may
        write over them.
        """
        ...


@dataclass(frozen=True)
class Shape:
    """What a slot holds: ``rows`` rows of ``width`` tokens, none of them longer than ``keys``, and
    as many ``columns`` of pages; the rest says where padding goes.

    ``spare``: row of the sequence table that is nobody's.
    """

    mode: Mode
    rows: int
    width: int
    keys: int
    page_size: int
    spare: int

    @staticmethod
    def of(mode: Mode, rows: int, sizes: Sizes, keys: int = 0) -> Shape:
        """``keys``: 0 for as many as there can be."""
        return Shape(
            mode, rows, sizes.width, keys or sizes.positions, sizes.page_size, sizes.max_running
        )

    @property
    def columns(self) -> int:
        return -(-self.keys // self.page_size)

    @property
    def fields(self) -> tuple[tuple[int, np.dtype[Any]], ...]:
        """Length and dtype of positions, slots, rows and kv_lens, as they lie behind one another."""
        tokens = self.rows * self.width
        return (tokens, LONG), (tokens, LONG), (self.rows, LONG), (self.rows, INT)

    @property
    def offsets(self) -> list[int]:
        """Byte at which each field begins, and at which the last one ends."""
        ends = [0]
        for length, dtype in self.fields:
            ends.append(ends[-1] + -(-length * dtype.itemsize // ALIGNED) * ALIGNED)
        return ends

    @property
    def padded_length(self) -> int:
        """Tokens in the cache of a row that fills up: a speculative draft finds one before its own."""
        return self.width + (self.width > 1)

    @property
    def padded_columns(self) -> int:
        """Pages that such a row and the drafts behind it may touch; all of them the scratch page."""
        return -(-(self.padded_length + self.width) // self.page_size)


@dataclass(frozen=True)
class Held:
    """A turn's host memory: ``all`` of it, and the fields in it, positions and slots as [B, W]."""

    all: Tensor
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    rows: NDArray[np.int64]
    kv_lens: NDArray[np.int32]


class Piece:
    """Stands for one graph where attention plans it."""

    def __init__(self, name: str) -> None:
        self.name = name


class Slot:
    """See ``core.segments.Segments``: pieces are captured while ``recorder`` is set, replayed
    afterwards.

    Attributes:
        batch: the slot's own batch. Its device tensors stay where they are.
    """

    def __init__(
        self, shape: Shape, device: torch.device, staging: Staging, recorder: Recorder | None
    ) -> None:
        self.shape = shape
        self.recorder = recorder
        self._staging = staging
        self._memory = torch.zeros(shape.offsets[-1], dtype=torch.uint8, device=device)
        self._table = torch.zeros(shape.rows, shape.columns, dtype=torch.int32, device=device)
        self._pages: NDArray[np.int32] = np.zeros(
            (shape.rows, shape.columns), np.int32
        )  # what ``_table`` holds
        self._offsets = np.arange(shape.width, dtype=np.int64)
        self._first_columns = np.arange(shape.rows, dtype=np.int64)[:, None] * shape.columns
        self._padding = np.tile(
            (shape.padded_length - shape.width + self._offsets) % shape.page_size, (shape.rows, 1)
        )
        self._views: dict[int, Held] = {}
        self._live = 0
        self._graphs: dict[str, tuple[Callable[[], None], Any]] = {}
        self._parts: dict[str, Piece] = {}
        self.batch = self._own_batch(device)

    def _own_batch(self, device: torch.device) -> Batch:
        rows = self.shape.rows
        width = self.shape.width
        made = Batch(
            step=0,
            mode=self.shape.mode,
            rows=np.full(rows, self.shape.spare, np.int32),
            epochs=np.zeros(rows, np.int64),
            num_decodes=rows,
            query_lens=np.full(rows, width, np.int32),
            kv_lens=np.full(rows, self.shape.padded_length, np.int32),
            samples=np.ones(rows, np.bool_),
            prompt_ids=np.zeros(0, np.int32),
            pages=self._pages[:, :1],
            segments=self,
            longest=self.shape.keys,
            agreed=StepShape(self.shape.mode, rows, rows * width),
        )
        offsets = self.shape.offsets
        made.positions, made.slots, made.row_ids, made.kv_lens_device = (
            self._memory[at : at + length * dtype.itemsize].view(
                torch.int64 if dtype == LONG else torch.int32
            )
            for at, (length, dtype) in zip(offsets, self.shape.fields)
        )
        made.query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * width
        made.page_table = self._table
        return made

    # ---- Segments --------------------------------------------------------------------------------

    def part(self, name: str) -> object:
        return self._parts.setdefault(name, Piece(name))

    def run(self, name: str, work: Callable[[], T]) -> T:
        found = self._graphs.get(name)
        if found is None:
            return work() if self.recorder is None else self._record(name, work)
        found[0]()
        return found[1]  # type: ignore[no-any-return]

    def _record(self, name: str, work: Callable[[], T]) -> T:
        assert self.recorder is not None
        try:
            self._graphs[name] = self.recorder.record(work)
        except Exception as error:
            error.add_note(name)
            raise
        return self._graphs[name][1]  # type: ignore[no-any-return]

    def seal(self) -> None:
        """Nothing more is captured; results share their memory with those of the slots captured
        after this one.
        """
        assert self.recorder is not None, "it is sealed once"
        self._graphs = {
            name: (replay, self.recorder.loosen(results))
            for name, (replay, results) in self._graphs.items()
        }
        self.recorder = None

    @property
    def pieces(self) -> tuple[str, ...]:
        """Names of what was captured."""
        return tuple(self._graphs)

    # ---- filling ---------------------------------------------------------------------------------

    def fill(self, batch: Batch) -> Batch:
        """The rows of ``batch``, then padding; enqueued, without waiting for the device."""
        own = self.batch
        live = batch.num_rows
        shape = self.shape
        own.step = batch.step
        own.rows[:live], own.kv_lens[:live] = batch.rows, batch.kv_lens
        if live < self._live:
            own.rows[live : self._live], own.kv_lens[live : self._live] = (
                shape.spare,
                shape.padded_length,
            )
        self._fill_pages(batch.pages, live)
        turn = self._staging.take()
        held = self._held(turn)
        np.add((own.kv_lens - shape.width)[:, None], self._offsets, out=held.positions)
        columns = held.positions // shape.page_size
        pages = self._pages.reshape(-1)[columns + self._first_columns]
        np.add((pages - columns) * shape.page_size, held.positions, out=held.slots)
        held.slots[live:] = self._padding[
            live:
        ]  # NOTE: the page table may be stale behind its first columns
        held.rows[:], held.kv_lens[:] = own.rows, own.kv_lens
        self._staging.copy(turn, held.all, self._memory)
        return own

    def _held(self, turn: int) -> Held:
        if turn not in self._views:
            host = self._staging.buffers[turn][: len(self._memory)]
            parts = [
                host[at : at + length * dtype.itemsize].numpy().view(dtype)
                for at, (length, dtype) in zip(self.shape.offsets, self.shape.fields)
            ]
            grid = (self.shape.rows, self.shape.width)
            self._views[turn] = Held(
                host, parts[0].reshape(grid), parts[1].reshape(grid), parts[2], parts[3]
            )
        return self._views[turn]

    def _fill_pages(self, pages: NDArray[np.int32], live: int) -> None:
        """Bring the page table up to date. Columns further right keep what they held: no row reads
        so far.
        """
        pages = pages[
            :, : self.shape.columns
        ]  # a row may have more, for tokens that are still to come
        given = pages.shape[1]
        columns = min(max(given, self.shape.padded_columns), self.shape.columns)
        self.batch.pages = self._pages[:, :columns]
        if live == self._live and np.array_equal(self._pages[:live, :given], pages):
            return
        top = max(live, self._live)
        self._live = live
        self._pages[:live, :given], self._pages[live:top, :columns] = pages, 0
        turn = self._staging.take()
        staged = (
            self._staging.buffers[turn][: 4 * top * columns].view(torch.int32).view(top, columns)
        )
        staged.numpy()[:] = self._pages[:top, :columns]
        self._staging.copy(turn, staged, self._table[:top, :columns])
