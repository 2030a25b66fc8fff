"""Byte ranges of files straight into device memory: threads read, the device fetches, nobody waits
for one tensor.

Neighbouring ranges become one block of device memory. Threads fill pinned staging buffers, piece by
piece and in order, and each full one is copied to its block without waiting. Reading by ``pread``
beats copying out of a mapping, whose pages are faulted in one by one.
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

PIECE = 8 << 20  #: bytes read at a time, and of one staging buffer
BLOCK = 256 << 20  #: bytes of device memory that neighbours share
GAP = 1 << 20  #: unwanted bytes between neighbours that are read along rather than skipped
THREADS = 16

Key = TypeVar("Key")


@dataclass(frozen=True)
class Span(Generic[Key]):
    """``size`` bytes of ``file`` from ``start`` on, wanted for ``key``."""

    key: Key
    file: Path
    start: int
    size: int


@dataclass
class Block(Generic[Key]):
    """Spans of one file that are read as one range."""

    file: Path
    start: int
    end: int
    spans: list[Span[Key]] = field(default_factory=list)


def blocks_of(spans: Sequence[Span[Key]], most: int = BLOCK) -> list[Block[Key]]:
    """Spans by file and place, neighbours together, up to ``most`` bytes a block (a larger span is
    one by itself).
    """
    blocks: list[Block[Key]] = []
    for span in sorted(spans, key=lambda span: (span.file, span.start)):
        last = blocks[-1] if blocks else None
        end = span.start + span.size
        if (
            last is None
            or last.file != span.file
            or span.start - last.end > GAP
            or end - last.start > most
        ):
            last = Block(span.file, span.start, span.start)
            blocks.append(last)
        last.end = max(last.end, end)
        last.spans.append(span)
    return blocks


class DirectReader(Generic[Key]):
    """Reads blocks in order. On the CPU (tests) staging is not pinned and the copies wait."""

    def __init__(self, device: str, threads: int = THREADS, piece: int = PIECE) -> None:
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

    def read(self, blocks: Sequence[Block[Key]]) -> Iterator[tuple[Span[Key], Tensor]]:
        """Each span once with its bytes, uint8 on the device, ready for the current stream.

        The bytes lie in their block's memory, which lives as long as anything that views it.
        """
        pieces = [
            (block, at)
            for block in blocks
            for at in range(block.start, max(block.end, block.start + 1), self._piece)
        ]
        slots = len(self._staging)
        with ThreadPoolExecutor(self._threads, "weights") as pool:
            reads: deque[Future[int]] = deque(
                pool.submit(self._fill, number, *piece)
                for number, piece in enumerate(pieces[:slots])
            )
            try:
                memory = torch.empty(0)
                for number, (block, at) in enumerate(pieces):
                    size = reads.popleft().result()
                    if at == block.start:
                        memory = torch.empty(
                            block.end - block.start, dtype=torch.uint8, device=self._device
                        )
                    self._land(number % slots, memory[at - block.start : at - block.start + size])
                    if number + slots < len(pieces):
                        reads.append(
                            pool.submit(self._fill, number % slots, *pieces[number + slots])
                        )
                    if at + self._piece >= block.end:
                        yield from _spans(block, memory)
            finally:
                for read in reads:
                    read.cancel()

    def close(self) -> None:
        """After the last copy from a staging buffer."""
        for event in self._copied:
            if event is not None:
                event.synchronize()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._staging = []

    def _fill(self, slot: int, block: Block[Key], at: int) -> int:
        """On a thread: one piece of a file into a staging buffer, once its last copy is done."""
        event = self._copied[slot]
        if event is not None:
            event.synchronize()
        wanted = min(self._piece, block.end - at)
        view = self._staging[slot].numpy().data
        done = 0
        try:
            while done < wanted:
                got = os.preadv(self._open(block.file), [view[done:wanted]], at + done)
                if not got:
                    raise WeightError(
                        f"{block.file}: ends at byte {at + done}, {block.end} were expected; the file "
                        "has changed since its header was read"
                    )
                done += got
        except OSError as error:
            raise WeightError(f"{block.file}: cannot be read: {error.strerror or error}") from None
        return wanted

    def _open(self, path: Path) -> int:
        # NOTE: opened by whichever thread comes first; a loser of that race closes its own again.
        if path not in self._files:
            file = os.open(path, os.O_RDONLY)
            if self._files.setdefault(path, file) != file:
                os.close(file)
        return self._files[path]

    def _land(self, slot: int, place: Tensor) -> None:
        """Enqueue the copy of a full staging buffer to its place."""
        place.copy_(self._staging[slot][: len(place)], non_blocking=self._on_device)
        if self._on_device:
            event = self._copied[slot] or torch.cuda.Event()
            event.record()
            self._copied[slot] = event


def _spans(block: Block[Key], memory: Tensor) -> Iterator[tuple[Span[Key], Tensor]]:
    for span in block.spans:
        at = span.start - block.start
        yield span, memory[at : at + span.size]
