"""Choice of plain decoding steps when no row has drafts, from what the last results foresee.

An algorithm may know with each result how many drafts a row will have in its next step
(``Accepted.next_drafts``). If no row of a step has any, the step verifies nothing and is a plain
decoding step. The numbers come to the host with the results, so that nothing more is waited for. If
steps overlap, they are those of one step before: a row then verifies, or does not, one step late.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.protocols import DraftPolicy

Ints = NDArray[np.int32]


class FixedDrafts:
    """The ``protocols.DraftPolicy`` of drafts of one size, ``shape``."""

    clocked = False

    def __init__(self, shape: DraftShape) -> None:
        self._shape = shape

    def choose(self, rows: Ints, most: int) -> DraftShape:
        return self._shape

    def observe(self, rows: Ints, shape: DraftShape, counts: Ints) -> None:
        pass

    def took(self, rows: int, shape: DraftShape, seconds: float) -> None:
        pass

    def forget(self, row: int) -> None:
        pass


class ForeseenDrafts:
    """The ``protocols.DraftPolicy`` that chooses no drafts if no row has any.

    Args:
        policy: The policy that chooses in all other steps.
        rows: Number of rows of the sequence table.
    """

    def __init__(self, policy: DraftPolicy, rows: int) -> None:
        self.policy = policy
        self.clocked = policy.clocked
        self._have = np.ones(rows, np.bool_)  # a row that nothing is known of may have drafts

    def choose(self, rows: Ints, most: int) -> DraftShape:
        return self.policy.choose(rows, most) if self._have[rows].any() else NO_DRAFTS

    def observe(self, rows: Ints, shape: DraftShape, counts: Ints) -> None:
        self.policy.observe(rows, shape, counts)

    def expect(self, rows: Ints, drafts: Ints) -> None:
        """Note how many drafts rows have for their next steps; see ``protocols.DraftPolicy``."""
        self._have[rows] = drafts > 0
        if hasattr(self.policy, "expect"):
            self.policy.expect(rows, drafts)

    def took(self, rows: int, shape: DraftShape, seconds: float) -> None:
        self.policy.took(rows, shape, seconds)

    def forget(self, row: int) -> None:
        self._have[row] = True
        self.policy.forget(row)
