"""Reading of byte ranges of files into device memory, with reads and copies overlapped.

Neighbouring ranges become one block of device memory. Threads fill pinned staging buffers, piece by
piece and in order; each full buffer is copied to its block asynchronously. Reading with ``pread``
is faster than copying out of a memory mapping, whose pages are faulted in one by one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from glowplug.core.errors import WeightError

PIECE_BYTES = 8 << 20  #: size of one read, and of a staging buffer
BLOCK_BYTES = 256 << 20  #: largest block of device memory that neighbouring ranges share
GAP = 1 << 20  #: most unwanted bytes between neighbouring ranges that are read too
THREADS = 16  #: most reading threads

Key = TypeVar("Key")


@dataclass(frozen=True)
class Span(Generic[Key]):
    """A request for ``size`` bytes of ``file`` from byte ``start``; ``key`` identifies it."""

    key: Key
    file: Path
    start: int
    size: int


@dataclass
class ReadBlock(Generic[Key]):
    """Neighbouring spans of one file that are read together, as the bytes ``start`` to ``end``."""

    file: Path
    start: int
    end: int
    spans: list[Span[Key]] = field(default_factory=list)


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
            or last.file != span.file
            or span.start - last.end > GAP
            or end - last.start > max_bytes
        ):
            last = ReadBlock(span.file, span.start, span.start)
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
        piece: number of bytes per read.
    """

    def __init__(self, device: str, threads: int = THREADS, piece: int = PIECE_BYTES) -> None:
        self._device = torch.device(device)
        self._on_device = self._device.type == "cuda"
        self._threads = threads
        self._piece = piece
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
        pieces = [
            (block, at)
            for block in blocks
            for at in range(block.start, max(block.end, block.start + 1), self._piece)
        ]
        buffers = len(self._staging)
        with ThreadPoolExecutor(self._threads, "weights") as pool:
            reads: deque[Future[int]] = deque(
                pool.submit(self._fill, number, *piece)
                for number, piece in enumerate(pieces[:buffers])
            )
            try:
                memory = torch.empty(0)
                for number, (block, at) in enumerate(pieces):
                    size = reads.popleft().result()
                    if at == block.start:
                        memory = torch.empty(
                            block.end - block.start, dtype=torch.uint8, device=self._device
                        )
                    self._copy(number % buffers, memory[at - block.start : at - block.start + size])
                    if number + buffers < len(pieces):
                        reads.append(
                            pool.submit(self._fill, number % buffers, *pieces[number + buffers])
                        )
                    if at + self._piece >= block.end:
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

    def _fill(self, buffer: int, block: ReadBlock[Key], at: int) -> int:
        """Read one piece of ``block``, from offset ``at`` of its file, into a staging buffer.

        The method runs on a reading thread and first waits until the buffer's previous content has
        been copied to the device.

        Returns:
            The number of bytes read.
        """
        event = self._copied[buffer]
        if event is not None:
            event.synchronize()
        wanted = min(self._piece, block.end - at)
        view = self._staging[buffer].numpy().data
        done = 0
        try:
            while done < wanted:
                got = os.preadv(self._open(block.file), [view[done:wanted]], at + done)
                if not got:
                    raise WeightError(
                        f"{block.file}: ends at byte {at + done}, expected {block.end}; the file "
                        "has changed since its header was read"
                    )
                done += got
        except OSError as error:
            raise WeightError(f"{block.file}: cannot be read: {error.strerror or error}") from None
        return wanted

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
    for span in block.spans:
        at = span.start - block.start
        yield span, memory[at : at + span.size]
