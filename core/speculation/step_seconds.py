"""Seconds of a step by size of the drafts and rows: those of the start, corrected in service.

The start measures steps of short sequences and leaves out the work of the host around them. In
service, long sequences or a busy host make steps slower, all sizes by about the same time. Steps
are faster than measured where the start extrapolated from few rows, or timed the first step of a
size, which may take many times as long: then all sizes by about the same factor. The difference is
measured for each size and number of rows that occurs; a size without new measurements is taken to
differ like the nearest one that has some. Steps are spent to measure smaller sizes than the chosen
one (``unmeasured``), as those that the host limits are no faster than larger ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

KEPT = 8  #: measurements of a size and number of rows that count; their median is taken
LEAST_KEPT = 3  #: measurements from which on the median is used
TRIES = 2 * LEAST_KEPT  #: steps spent to measure a size
#: later measurements, of any size, after which those of a size no longer count
FRESH_MEASUREMENTS = 1000


class StepSeconds:
    """Seconds of a step for each size of the drafts.

    Args:
        measured: seconds measured at the start, float64 [sizes, rows + 1].
    """

    def __init__(self, measured: Floats) -> None:
        # larger drafts cost no less, also where costs are extrapolated
        self._measured: Floats = np.maximum.accumulate(measured, 0)
        sizes, rows = measured.shape
        groups = rows.bit_length() + 1
        self._slower = np.zeros((groups, sizes, KEPT))  # seconds more than measured, at least 0
        self._factors = np.ones((groups, sizes, KEPT))  # seconds to those measured, at most 1
        self._counts = np.zeros((groups, sizes), np.int64)
        self._last = np.zeros((groups, sizes), np.int64)  # number of the last measurement
        self._tries = np.zeros((groups, sizes), np.int64)
        self._number = 0
        self._corrected: dict[int, Floats] = {}

    def at(self, rows: int) -> Floats:
        """Return the seconds of a step of ``rows`` rows for each size, float64 [sizes]."""
        found = self._corrected.get(rows)
        if found is None:
            found = self._corrected[rows] = self._correct(rows)
        return found

    def add(self, place: int, rows: int, seconds: float) -> None:
        """Add a measurement of a step of ``rows`` rows with drafts of the size at ``place``."""
        group = rows.bit_length()
        self._number += 1
        if self._number - self._last[group, place] > FRESH_MEASUREMENTS:
            self._counts[group, place] = 0
        slot = int(self._counts[group, place]) % KEPT
        measured = self._measured[place, rows]
        self._slower[group, place, slot] = max(seconds - measured, 0.0)
        self._factors[group, place, slot] = min(seconds / measured, 1.0)
        self._counts[group, place] += 1
        self._last[group, place] = self._number

    def unmeasured(self, rows: int, below: int) -> int | None:
        """Return the place of a size to measure, the largest below a place; None: there is none.

        A size is measured by a few steps, and again when its measurements no longer count. Steps
        beside prompts are not measured, so no more than ``TRIES`` steps are spent without success.
        """
        if not below:
            return None
        group = rows.bit_length()
        known = self._known(group)[:below]
        self._tries[group, :below][known] = 0
        wanted = np.flatnonzero(~known & (self._tries[group, :below] < TRIES))
        if not len(wanted):
            return None
        self._tries[group, wanted[-1]] += 1
        return int(wanted[-1])

    def _known(self, group: int) -> NDArray[np.bool_]:
        """Return whether each size has enough measurements that count, bool [sizes]."""
        known: NDArray[np.bool_] = self._number - self._last[group] < FRESH_MEASUREMENTS
        known &= self._counts[group] >= LEAST_KEPT
        return known

    def refresh(self) -> None:
        """Let ``at`` return seconds that all measurements so far correct."""
        self._corrected.clear()

    def _correct(self, rows: int) -> Floats:
        """Return the corrected seconds of a step of ``rows`` rows."""
        group = rows.bit_length()
        measured = self._measured[:, rows]
        known = np.flatnonzero(self._known(group))
        if not len(known):
            return measured
        kept = int(min(KEPT, self._counts[group, known].min()))
        slower, factor = (
            np.median(kind[group, known, :kept], axis=1) for kind in (self._slower, self._factors)
        )
        places = np.arange(len(measured))
        nearest = np.abs(places[:, None] - known).argmin(1)
        corrected = measured * factor[nearest] + slower[nearest]
        found: Floats = np.maximum.accumulate(corrected)
        return found
