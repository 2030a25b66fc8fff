"""A captured decode graph: one padded batch over fixed memory, and the graphs of its pieces.

B is the number of rows, W the number of tokens of a row, and T = B * W. Padding rows follow the
live rows. Each repeats token 0 of a short sequence in the scratch page, on the spare row of the
sequence table, and its results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.plan.plan import Sizes
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch, shape_of
from glowplug.plugins.graphs.capture.padding_marks import PaddingMarks, mark_bytes
from glowplug.plugins.graphs.capture.staging import Staging

T = TypeVar("T")
FIELD_ALIGNMENT = 256  #: alignment of each field's first byte
LONG = np.dtype(np.int64)  #: dtype of positions, KV slots and rows
INT = np.dtype(np.int32)  #: dtype of row lengths


class GraphRecorder(Protocol):
    """Recorder that captures one piece of a step at a time as a graph."""

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Run ``work`` once, so that first-use costs are not captured, then capture it.

        Returns:
            A function that replays the graph, and the results, which are already valid.
        """
        ...

    def loosen(self, results: T) -> T:
        """Return the tensors of ``results`` without ownership of their memory.

        From then on, the replay of another graph may overwrite the results.
        """
        ...


@dataclass(frozen=True)
class GraphShape:
    """The shape of a decode graph, and the row of the sequence table for its padding.

    Attributes:
        mode: Mode of the step.
        rows: Rows of the padded batch.
        width: Tokens per row.
        keys: Number of cached tokens of the longest row that the graph can hold.
        page_size: Tokens per page.
        spare: Row of the sequence table that no sequence uses, for padding rows.
        groups: Number of groups of ranks whose padding is marked; 0: padding is not marked.
        lookahead: Number of positions after a row's tokens that drafts write to.
        drafts: Size of the drafts of a row; None: the engine never drafts.
    """

    mode: Mode
    rows: int
    width: int
    keys: int
    page_size: int
    spare: int
    groups: int = 0
    lookahead: int = 0
    drafts: DraftShape | None = None

    @staticmethod
    def of(
        rows: int,
        sizes: Sizes,
        keys: int = 0,
        groups: int = 0,
        drafts: DraftShape | None = None,
    ) -> GraphShape:
        """Return the shape for ``rows`` rows of up to ``keys`` tokens.

        Args:
            rows: Rows of the padded batch.
            sizes: Sizes of the plan.
            keys: Most cached tokens of a row; 0: as many as the plan allows.
            groups: Number of groups of ranks whose padding is marked.
            drafts: Size of the drafts of a row; None: the plan's largest.
        """
        drafts = drafts or sizes.step_shapes[-1]
        return GraphShape(
            Mode.DECODE if drafts.tokens == 1 else Mode.VERIFY,
            rows,
            drafts.tokens,
            keys or sizes.positions,
            sizes.page_size,
            sizes.max_running,
            groups,
            sizes.lookahead,
            drafts if sizes.width > 1 else None,
        )

    @property
    def columns(self) -> int:
        """Number of pages of the longest row: the columns of the page table."""
        return -(-self.keys // self.page_size)

    @property
    def fields(self) -> tuple[tuple[int, np.dtype[Any]], ...]:
        """Length and dtype of positions, KV slots, rows and kv_lens, in their order in memory."""
        tokens = self.rows * self.width
        return (tokens, LONG), (tokens, LONG), (self.rows, LONG), (self.rows, INT)

    @property
    def offsets(self) -> list[int]:
        """Byte offset of each field in the memory, and of the end of the last field."""
        ends = [0]
        for length, dtype in self.fields:
            ends.append(ends[-1] + -(-length * dtype.itemsize // FIELD_ALIGNMENT) * FIELD_ALIGNMENT)
        return ends

    @property
    def staged_bytes(self) -> int:
        """Bytes of the largest copy to the graph's memory."""
        marks = mark_bytes(self.rows, self.width, self.groups)
        return max(self.offsets[-1], 4 * self.rows * self.columns, marks)

    @property
    def padded_length(self) -> int:
        """Number of cached tokens of a padding row.

        These are the tokens that the row computes and, with drafts, one token before them, because
        a draft's cache has no entry at the first position.
        """
        return self.width + (self.drafts is not None)

    @property
    def padded_columns(self) -> int:
        """Number of page-table entries that a padding row and its drafts may read.

        Each of these entries is the scratch page.
        """
        return -(-(self.padded_length + self.width + self.lookahead) // self.page_size)


@dataclass(frozen=True)
class Held:
    """One staging buffer of a decode graph, on the host.

    Attributes:
        all: The whole buffer.
        positions: View of the positions, [B, W].
        kv_slots: View of the KV slots, [B, W].
        rows: View of the rows, [B].
        kv_lens: View of the row lengths, [B].
    """

    all: Tensor
    positions: NDArray[np.int64]
    kv_slots: NDArray[np.int64]
    rows: NDArray[np.int64]
    kv_lens: NDArray[np.int32]


class CapturedPiece:
    """Key of one captured piece, passed to ``AttentionBackend.plan_step`` as ``graph``."""

    def __init__(self, name: str) -> None:
        self.name = name


class DecodeGraph:
    """One captured decode graph, which implements ``core.step.graph_pieces.GraphPieces``.

    Pieces of the step are captured while ``recorder`` is set and replayed afterwards.

    Attributes:
        shape: The graph's shape.
        recorder: Recorder of the pieces; None once the graph is sealed.
        batch: The graph's own batch, whose device tensors keep their addresses.
    """

    def __init__(
        self,
        shape: GraphShape,
        device: torch.device,
        staging: Staging,
        recorder: GraphRecorder | None,
    ) -> None:
        self.shape = shape
        self.recorder = recorder
        self._staging = staging
        self._memory = torch.zeros(shape.offsets[-1], dtype=torch.uint8, device=device)
        self._table = torch.zeros(shape.rows, shape.columns, dtype=torch.int32, device=device)
        # copy of ``_table`` on the host
        self._pages: NDArray[np.int32] = np.zeros((shape.rows, shape.columns), np.int32)
        self._set_places()
        self._views: dict[int, Held] = {}
        self._live = 0
        self._graphs: dict[str, tuple[Callable[[], None], Any]] = {}
        self._keys: dict[str, CapturedPiece] = {}
        self.batch = self._own_batch(device)
        self._marks: PaddingMarks | None = None
        if shape.groups:
            self._marks = PaddingMarks(shape.rows, shape.width, shape.groups, device, staging)
            self.batch.padding = self._marks.step
            self.batch.draft_padding = self._marks.drafts

    def _set_places(self) -> None:
        """Make the arrays that are equal in all steps: offsets in a row, columns, padding slots."""
        shape = self.shape
        self._offsets = np.arange(shape.width, dtype=np.int64)
        self._first_columns = np.arange(shape.rows, dtype=np.int64)[:, None] * shape.columns
        self._padding = np.tile(
            (shape.padded_length - shape.width + self._offsets) % shape.page_size, (shape.rows, 1)
        )

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
            draft_shape=self.shape.drafts,
            pieces=self,
            longest=self.shape.keys,
        )
        made.agreed = shape_of(made)
        made.positions, made.kv_slots, made.row_ids, made.kv_lens_device = self._device_fields()
        made.query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * width
        made.page_table = self._table
        return made

    def _device_fields(self) -> Iterator[Tensor]:
        """Yield the parts of the graph's memory, in the order of ``GraphShape.fields``."""
        for at, (length, dtype) in zip(self.shape.offsets, self.shape.fields):
            part = self._memory[at : at + length * dtype.itemsize]
            yield part.view(torch.int64 if dtype == LONG else torch.int32)

    # ---- GraphPieces -----------------------------------------------------------------------------

    def key(self, name: str) -> object:
        return self._keys.setdefault(name, CapturedPiece(name))

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
        """End the capture of this graph.

        Graphs that are captured later may then use the memory of its results.
        """
        assert self.recorder is not None, "a graph is sealed only once"
        self._graphs = {
            name: (replay, self.recorder.loosen(results))
            for name, (replay, results) in self._graphs.items()
        }
        self.recorder = None

    @property
    def pieces(self) -> tuple[str, ...]:
        """Names of the captured pieces of the step."""
        return tuple(self._graphs)

    # ---- filling ---------------------------------------------------------------------------------

    def fill(self, batch: Batch) -> Batch:
        """Copy the rows of ``batch`` into the graph's batch, pad it, and return it.

        The copies are enqueued without waiting for the device.
        """
        own = self.batch
        live = batch.num_rows
        shape = self.shape
        own.step = batch.step
        own.rows[:live] = batch.rows
        own.kv_lens[:live] = batch.kv_lens
        if live < self._live:
            own.rows[live : self._live] = shape.spare
            own.kv_lens[live : self._live] = shape.padded_length
        self._fill_pages(batch.pages, live)
        self._fill_numbers(live)
        if self._marks is not None:
            self._marks.fill(batch)
        return own

    def _fill_numbers(self, live: int) -> None:
        """Compute positions and KV slots, and copy all device fields to the graph's memory.

        The page table must already be that of the step.

        Args:
            live: number of rows that are not padding.
        """
        own = self.batch
        shape = self.shape
        number = self._staging.take()
        held = self._held(number)
        np.add((own.kv_lens - shape.width)[:, None], self._offsets, out=held.positions)
        columns = held.positions // shape.page_size
        pages = self._pages.reshape(-1)[columns + self._first_columns]
        np.add((pages - columns) * shape.page_size, held.positions, out=held.kv_slots)
        # NOTE: the page table of padding rows may be stale beyond its first columns
        held.kv_slots[live:] = self._padding[live:]
        held.rows[:] = own.rows
        held.kv_lens[:] = own.kv_lens
        self._staging.copy(number, held.all, self._memory)

    def _held(self, number: int) -> Held:
        """Return the views of staging buffer ``number``."""
        if number not in self._views:
            host = self._staging.buffers[number][: len(self._memory)]
            parts = [
                host[at : at + length * dtype.itemsize].numpy().view(dtype)
                for at, (length, dtype) in zip(self.shape.offsets, self.shape.fields)
            ]
            grid = (self.shape.rows, self.shape.width)
            self._views[number] = Held(
                host, parts[0].reshape(grid), parts[1].reshape(grid), parts[2], parts[3]
            )
        return self._views[number]

    def _fill_pages(self, pages: NDArray[np.int32], live: int) -> None:
        """Update the page table for the first ``live`` rows; the others are padding.

        Later columns keep their old values, because no row reads them.
        """
        # a row may own more pages, for tokens of later steps
        pages = pages[:, : self.shape.columns]
        given = pages.shape[1]
        columns = min(max(given, self.shape.padded_columns), self.shape.columns)
        self.batch.pages = self._pages[:, :columns]
        if live == self._live and np.array_equal(self._pages[:live, :given], pages):
            return
        top = max(live, self._live)
        self._live = live
        self._pages[:live, :given] = pages
        self._pages[live:top, :columns] = 0
        number = self._staging.take()
        staged = (
            self._staging.buffers[number][: 4 * top * columns].view(torch.int32).view(top, columns)
        )
        staged.numpy()[:] = self._pages[:top, :columns]
        self._staging.copy(number, staged, self._table[:top, :columns])
