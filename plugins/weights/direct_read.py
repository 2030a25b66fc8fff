"""Reading of byte ranges of files into device memory, with reads and copies overlapped.

Neighbouring ranges become one block of device memory. Threads fill pinned staging buffers, piece by
piece and in order; each full buffer is copied to its block asynchronously. Reading with ``pread``
is faster than copying out of a memory mapping, whose pages are faulted in one by one. A range may
be cut to some columns: its rows are read whole, and only the columns are staged and copied.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from glowplug.core.errors import WeightError

PIECE_BYTES = 8 << 20  #: size of one read, and of a staging buffer
BLOCK_BYTES = 256 << 20  #: largest block of device memory that neighbouring ranges share
GAP = 1 << 20  #: most unwanted bytes between neighbouring ranges that are read too
THREADS = 16  #: most reading threads
#: bytes of rows that a thread reads before it packs their columns; few enough for a core's cache
SCRATCH_BYTES = 1 << 20

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Key = TypeVar("Key")


class Columns(NamedTuple):
    """Bytes ``first`` to ``first + width`` of each row of ``pitch`` bytes."""

    pitch: int
    first: int
    width: int


@dataclass(frozen=True)
class Span(Generic[Key]):
    """A request for ``size`` bytes of ``file`` from byte ``start``; ``key`` identifies it.

    With ``columns`` the bytes are whole rows, of which only these columns are wanted.
    """

    key: Key
    file: Path
    start: int
    size: int
    columns: Columns | None = None


@dataclass
class ReadBlock(Generic[Key]):
    """Neighbouring spans of one file that are read together, as the bytes ``start`` to ``end``.

    A span with ``columns`` has a block of its own.
    """

    file: Path
    start: int
    end: int
    spans: list[Span[Key]] = field(default_factory=list)
    columns: Columns | None = None

    def kept(self, size: int) -> int:
        """Return how many of the block's first ``size`` bytes are kept."""
        return size // self.columns.pitch * self.columns.width if self.columns else size

    def pieces(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield start and end in the file of pieces of at most ``most`` bytes.

        An empty block has one empty piece. Pieces of a block with columns are whole rows.
        """
        step = most
        if self.columns:
            assert self.columns.pitch <= most, "a row is longer than a piece"
            step = most // self.columns.pitch * self.columns.pitch
        for at in range(self.start, max(self.end, self.start + 1), step):
            yield at, min(at + step, self.end)


def blocks_of(spans: Sequence[Span[Key]], max_bytes: int = BLOCK_BYTES) -> list[ReadBlock[Key]]:
    """Group spans that are close together in a file into blocks, and return the blocks.

    Args:
        spans: the spans, in any order.
        max_bytes: largest size of a block in bytes; a larger span has a block of its own.
    """
    blocks: list[ReadBlock[Key]] = []
    for span in sorted(spans, key=lambda span: (span.file, span.start)):
        last = blocks[-1] if blocks else None
        end = span.start + span.size
        if (
            last is None
            or last.columns is not None
            or span.columns is not None
            or last.file != span.file
            or span.start - last.end > GAP
            or end - last.start > max_bytes
        ):
            last = ReadBlock(span.file, span.start, span.start, columns=span.columns)
            blocks.append(last)
        last.end = max(last.end, end)
        last.spans.append(span)
    return blocks


class DirectReader(Generic[Key]):
    """Reader that loads blocks of files into device memory, in order, with several threads.

    On the CPU (in tests) staging buffers are not pinned and copies are synchronous.

    Args:
        device: device of the blocks.
        threads: number of reading threads.
        piece: number of bytes per read, and the longest row that is cut to columns.
    """

    def __init__(self, device: str, threads: int = THREADS, piece: int = PIECE_BYTES) -> None:
        self._device = torch.device(device)
        self._on_device = self._device.type == "cuda"
        self._threads = threads
        self._scratch = threading.local()
        self.piece = piece
        count = 2 * threads
        self._staging = [
            torch.empty(piece, dtype=torch.uint8, pin_memory=self._on_device) for _ in range(count)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * count
        self._files: dict[Path, int] = {}

    def read(self, blocks: Sequence[ReadBlock[Key]]) -> Iterator[tuple[Span[Key], Tensor]]:
        """Read the blocks and yield each of their spans once, with its bytes.

        The bytes are a uint8 tensor on the device, ready for the current stream. The tensor is a
        view of its block's memory, which lives as long as any such view.

        Raises:
            WeightError: a file cannot be read or is shorter than expected.
        """
        pieces = [(block, *ends) for block in blocks for ends in block.pieces(self.piece)]
        buffers = len(self._staging)
        with ThreadPoolExecutor(self._threads, "weights") as pool:
            reads: deque[Future[int]] = deque(
                pool.submit(self._fill, number, *piece)
                for number, piece in enumerate(pieces[:buffers])
            )
            try:
                memory = torch.empty(0)
                for number, (block, at, end) in enumerate(pieces):
                    size = reads.popleft().result()
                    if at == block.start:
                        memory = torch.empty(
                            block.kept(block.end - block.start),
                            dtype=torch.uint8,
                            device=self._device,
                        )
                    place = block.kept(at - block.start)
                    self._copy(number % buffers, memory[place : place + size])
                    if number + buffers < len(pieces):
                        reads.append(
                            pool.submit(self._fill, number % buffers, *pieces[number + buffers])
                        )
                    if end >= block.end:
                        yield from _spans(block, memory)
            finally:
                for read in reads:
                    read.cancel()

    def close(self) -> None:
        """Release files and staging buffers, after the last copy has finished."""
        for event in self._copied:
            if event is not None:
                event.synchronize()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._staging = []

    def _fill(self, buffer: int, block: ReadBlock[Key], at: int, end: int) -> int:
        """Read bytes ``at`` to ``end`` of ``block``'s file into a staging buffer.

        The method runs on a reading thread and first waits until the buffer's previous content has
        been copied to the device. Of a block with columns only these are staged.

        Returns:
            The number of bytes staged.
        """
        event = self._copied[buffer]
        if event is not None:
            event.synchronize()
        staging = self._staging[buffer].numpy()
        if block.columns is not None:
            return self._pack(staging, block, block.columns, at, end)
        self._read(block, at, staging[: end - at])
        return end - at

    def _pack(
        self, staging: Bytes, block: ReadBlock[Key], columns: Columns, at: int, end: int
    ) -> int:
        """Read whole rows ``at`` to ``end``, and store their ``columns`` in ``staging``.

        Returns:
            The number of bytes stored.
        """
        pitch, first, width = columns
        step = max(1, SCRATCH_BYTES // pitch) * pitch
        done = 0
        for start in range(at, end, step):
            rows = self._rows(step)[: min(step, end - start)]
            self._read(block, start, rows)
            packed = staging[done : done + block.kept(rows.size)].reshape(-1, width)
            packed[:] = rows.reshape(-1, pitch)[:, first : first + width]
            done += packed.size
        return done

    def _rows(self, size: int) -> Bytes:
        """Return this thread's scratch memory, at least ``size`` bytes."""
        held: Bytes | None = getattr(self._scratch, "rows", None)
        if held is None or len(held) < size:
            held = np.empty(size, np.uint8)
            self._scratch.rows = held
        return held

    def _read(self, block: ReadBlock[Key], at: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes of ``block``'s file from ``at``."""
        view, done = into.data, 0
        try:
            while done < len(view):
                got = os.preadv(self._open(block.file), [view[done:]], at + done)
                if not got:
                    raise WeightError(
                        f"{block.file}: ends at byte {at + done}, expected {block.end}; the file "
                        "has changed since its header was read"
                    )
                done += got
        except OSError as error:
            raise WeightError(f"{block.file}: cannot be read: {error.strerror or error}") from None

    def _open(self, path: Path) -> int:
        # NOTE: several threads may open a file at once; all but the first close theirs again.
        if path not in self._files:
            file = os.open(path, os.O_RDONLY)
            if self._files.setdefault(path, file) != file:
                os.close(file)
        return self._files[path]

    def _copy(self, buffer: int, place: Tensor) -> None:
        """Enqueue the copy of a full staging buffer to ``place``, a view of the block's memory."""
        place.copy_(self._staging[buffer][: len(place)], non_blocking=self._on_device)
        if self._on_device:
            event = self._copied[buffer] or torch.cuda.Event()
            event.record()
            self._copied[buffer] = event


def _spans(block: ReadBlock[Key], memory: Tensor) -> Iterator[tuple[Span[Key], Tensor]]:
    """Yield each span of ``block`` with its bytes, a view of the block's ``memory``."""
    if block.columns:
        yield block.spans[0], memory
        return
    for span in block.spans:
        at = span.start - block.start
        yield span, memory[at : at + span.size]
