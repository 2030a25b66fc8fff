"""Seconds of a step by size of the drafts and rows: those of the start, corrected in service.

The start measures steps of short sequences and leaves out the work of the host around them. In
service, long sequences or a busy host make steps slower, all sizes by about the same time. Steps
are faster than measured where the start extrapolated from few rows, or timed the first step of a
size, which may take many times as long: then all sizes by about the same factor. The difference is
measured for each size and number of rows that occurs; a size without new measurements is taken to
differ like the nearest one that has some, or as it did from that one with a few more or fewer rows.

Other work on the machine may make all steps slower for a while, by about the same factor: plain
steps on a shared CPU took up to 1.6 times as long for 10 to 200 steps. Sizes that were measured at
different times would then seem to differ. Seconds are therefore divided by the pace of the steps
before: the median of their seconds, relative to those that are usual for their sizes.

Steps are spent to measure smaller sizes than the chosen one (``unmeasured``), as those that the
host limits are no faster than larger ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

KEPT = 8  #: measurements of a size and number of rows that count; their median is taken
LEAST_KEPT = 3  #: measurements from which on the median is used
TRIES = 2 * LEAST_KEPT  #: steps spent to measure a size
PACE_STEPS = 5  #: measurements that show the pace
#: later measurements, of any size, after which those of a size no longer count
FRESH_MEASUREMENTS = 1000


def _recent() -> deque[float]:
    return deque(maxlen=KEPT)


@dataclass
class _Size:
    """Measurements of steps with drafts of one size and about one number of rows.

    Attributes:
        slower: seconds more than those of the start, at least 0.
        factors: seconds relative to those of the start, at most 1.
        usual: medians of both when ``count`` was last called; None: the measurements are too few.
        last: number of the last measurement.
        tries: steps spent to measure the size.
    """

    slower: deque[float] = field(default_factory=_recent)
    factors: deque[float] = field(default_factory=_recent)
    usual: tuple[float, float] | None = None
    last: int = 0
    tries: int = 0

    def add(self, seconds: float, started: float) -> None:
        """Add a measurement; ``started``: the seconds of the start."""
        self.slower.append(max(seconds - started, 0.0))
        self.factors.append(min(seconds / started, 1.0))

    def count(self) -> None:
        """Set ``usual`` by the measurements so far.

        NOTE: for these few numbers ``numpy.median`` takes ten times as long.
        """
        if len(self.slower) >= LEAST_KEPT:
            self.usual = median(self.slower), median(self.factors)

    def clear(self) -> None:
        """Forget the measurements."""
        self.slower.clear()
        self.factors.clear()
        self.usual = None


class StepSeconds:
    """Seconds of a step for each size of the drafts.

    Args:
        measured: seconds measured at the start, float64 [sizes, rows + 1].
    """

    def __init__(self, measured: Floats) -> None:
        #: seconds of the start for each number of rows and size; larger drafts cost no less, also
        #: where costs are extrapolated
        self._started: list[list[float]] = np.maximum.accumulate(measured, 0).T.tolist()
        sizes, rows = measured.shape
        groups = rows.bit_length() + 1
        self._sizes = [[_Size() for _ in range(sizes)] for _ in range(groups)]
        self._added: list[tuple[int, int, float]] = []  # place, rows, seconds: not counted yet
        self._number = 0  # of measurements
        #: seconds of the last measurements relative to those usual for their sizes
        self._paces = deque([1.0], PACE_STEPS)
        self._corrected: dict[int, list[float]] = {}  # by rows
        self._changed = False  # measurements have been counted since the last ``refresh``

    def at(self, rows: int) -> list[float]:
        """Return the seconds of a step of ``rows`` rows for each size."""
        found = self._corrected.get(rows)
        if found is None:
            found = self._corrected[rows] = self._correct(rows)
        return found

    def add(self, place: int, rows: int, seconds: float) -> None:
        """Add a measurement of a step of ``rows`` rows with drafts of the size at ``place``.

        Several are counted together, which takes a third of the time.
        """
        self._added.append((place, rows, seconds))
        if len(self._added) == KEPT:
            self._count_added()

    def _count_added(self) -> None:
        """Count the measurements that were added, in order."""
        for place, rows, seconds in self._added:
            self._count(place, rows, seconds)
        for group, place in {(rows.bit_length(), place) for place, rows, _ in self._added}:
            self._sizes[group][place].count()
        self._added.clear()
        self._changed = True

    def _count(self, place: int, rows: int, seconds: float) -> None:
        """Count a measurement at the pace of those before it; arguments as in ``add``."""
        size = self._sizes[rows.bit_length()][place]
        started = self._started[rows][place]
        self._number += 1
        if self._number - size.last > FRESH_MEASUREMENTS:
            size.clear()
        size.last = self._number
        pace = median(self._paces)
        if size.usual is not None:
            slower, factor = size.usual
            self._paces.append(seconds / (started * factor + slower))
        size.add(seconds / pace, started)

    def unmeasured(self, rows: int, below: int) -> int | None:
        """Return the place of a size to measure, the largest below a place; None: there is none.

        A size is measured by ``LEAST_KEPT`` steps, and again when its measurements no longer count.
        Steps beside prompts are not measured, so no more than ``TRIES`` steps are spent without
        success.
        """
        group = rows.bit_length()
        sizes = self._sizes[group][:below]
        wanted = None
        for place, size in enumerate(sizes):
            if self._known(size):
                size.tries = 0
            elif size.tries < TRIES and not any(
                self._known(near[place]) for near in self._near(group)
            ):
                wanted = place
        if wanted is not None:
            sizes[wanted].tries += LEAST_KEPT
        return wanted

    def _near(self, group: int) -> list[list[_Size]]:
        """Return the sizes of the groups with up to about four times more or fewer rows.

        The nearest groups come first.
        """
        return [
            self._sizes[group + by] for by in (-1, 1, -2, 2) if 0 <= group + by < len(self._sizes)
        ]

    def _known(self, size: _Size) -> bool:
        """Return whether a size has enough measurements that count."""
        return size.usual is not None and self._number - size.last < FRESH_MEASUREMENTS

    def refresh(self) -> None:
        """Let ``at`` return seconds that all measurements so far correct."""
        if self._added:
            self._count_added()
        if self._changed:
            self._corrected.clear()
            self._changed = False

    def _correct(self, rows: int) -> list[float]:
        """Return the corrected seconds of a step of ``rows`` rows.

        NOTE: for these few numbers numpy takes several times as long as Python.
        """
        started = self._started[rows]
        group = rows.bit_length()
        known = self._usual(self._sizes[group])
        if not known:
            return started
        found = []
        least = 0.0
        for place, seconds in enumerate(started):
            slower, factor = known[place] if place in known else self._like(known, place, group)
            least = max(least, seconds * factor + slower)
            found.append(least)
        return found

    def _like(
        self, known: dict[int, tuple[float, float]], place: int, group: int
    ) -> tuple[float, float]:
        """Return the difference of a size that has too few measurements.

        Args:
            known: differences of the other sizes of its group.
            place: place of the size.
            group: its group.
        """
        nearest = min(known, key=lambda other: abs(other - place))
        slower, factor = known[nearest]
        for sizes in self._near(group):
            near = self._usual(sizes)
            if place in near and nearest in near:
                slower += near[place][0] - near[nearest][0]
                return max(slower, 0.0), factor * near[place][1] / near[nearest][1]
        return slower, factor

    def _usual(self, sizes: list[_Size]) -> dict[int, tuple[float, float]]:
        """Return ``_Size.usual`` of those of ``sizes`` that have enough measurements, by place."""
        return {
            place: size.usual
            for place, size in enumerate(sizes)
            if size.usual is not None and self._known(size)
        }
