"""Seconds of a step for each size of its drafts and each number of rows. Plan zone: no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from glowplug.core.plugin.draft_shape import DraftShape


@dataclass(frozen=True)
class ShapeCosts:
    """Seconds of a step whose decoding rows all have drafts of one size.

    Attributes:
        shape: the size of the drafts.
        rows: numbers of decoding rows that were measured, ascending.
        seconds: seconds of a step for each of ``rows``.
    """

    shape: DraftShape
    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, count: int) -> float:
        """Return the seconds of a step of ``count`` rows.

        Between measured numbers of rows the seconds are interpolated. Beyond the last one they
        grow as between the last two. Below the first one they are those of the first.
        """
        right = min(max(bisect_left(self.rows, count), 1), len(self.rows) - 1)
        if right < 1 or count <= self.rows[0]:
            return self.seconds[0]
        first, second = self.rows[right - 1], self.rows[right]
        slope = (self.seconds[right] - self.seconds[right - 1]) / (second - first)
        return (
            self.seconds[right] + max(slope, 0.0) * (count - second)
            if count > second
            else (self.seconds[right - 1] + slope * (count - first))
        )


@dataclass(frozen=True)
class DraftCosts:
    """Seconds of a step for several sizes of drafts.

    Attributes:
        entries: one entry for each size.
    """

    entries: tuple[ShapeCosts, ...]

    def of(self, shape: DraftShape) -> ShapeCosts | None:
        """Return the entry of ``shape``; None if there is none."""
        return next((entry for entry in self.entries if entry.shape == shape), None)

    def lacking(self, shapes: Sequence[DraftShape]) -> list[DraftShape]:
        """Return those of ``shapes`` that have no entry."""
        return [shape for shape in shapes if self.of(shape) is None]

    def table(self, shapes: Sequence[DraftShape], most: int) -> list[list[float]]:
        """Return for each shape the seconds of steps of 0 to ``most`` rows.

        Raises:
            KeyError: a shape has no entry.
        """
        found = []
        for shape in shapes:
            entry = self.of(shape)
            if entry is None:
                raise KeyError(shape)
            found.append([entry.at(count) for count in range(most + 1)])
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the content of a file of costs."""
        return {"draft_costs": [asdict(entry) for entry in self.entries]}

    @staticmethod
    def parse(data: bytes | str) -> DraftCosts:
        """Return the costs in the content of a file; other keys of the file are ignored.

        Raises:
            ValueError: the content is no table of costs; the message has the reason.
        """
        try:
            entries = msgspec.json.decode(data, type=_File).draft_costs
        except msgspec.DecodeError as error:
            raise ValueError(f"it is no table of costs: {error}") from error
        for entry in entries:
            if not entry.rows or len(entry.rows) != len(entry.seconds):
                raise ValueError("an entry has no rows, or not one number of seconds for each")
            if list(entry.rows) != sorted(set(entry.rows)) or entry.rows[0] < 1:
                raise ValueError(f"rows {list(entry.rows)} do not ascend from 1 or more")
            if min(entry.seconds) <= 0:
                raise ValueError(f"seconds {list(entry.seconds)} are not all positive")
        return DraftCosts(entries)

    @staticmethod
    def read(path: str) -> DraftCosts:
        """Return the costs in a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: see ``parse``.
        """
        return DraftCosts.parse(Path(path).read_bytes())


@dataclass(frozen=True)
class _File:
    """The part of a file that has the costs."""

    draft_costs: tuple[ShapeCosts, ...]
