"""Faults of policy and cache in calls that concern single sequences, which end these alone.

Every rank makes the same calls, and they are deterministic, so all ranks find the same faults.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence as Seq

from glowplug.core.errors import ComponentFailed
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.step.request import Sequence

logger = logging.getLogger("glowplug.engine")


class SequencesFailed(Exception):
    """Calls of a component have failed; the sequences are in ``Faults.found``."""


class Faults:
    """The sequences for which a call of policy or cache has failed, until they are ended.

    Attributes:
        found: id of a sequence -> its error.
        last: the last error since the pages' accounts were checked; None: there was none.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self.found: dict[int, ComponentFailed] = {}
        self.last: ComponentFailed | None = None
        self._plan = plan
        self._complaints: set[str] = set()

    def complain(self, what: str) -> None:
        """Log a fault of the policy that ends no sequence, each text once."""
        if what not in self._complaints:
            self._complaints.add(what)
            logger.error("%s %s", self._plan.title("policy"), what)

    def error(self, slot: str, method: str, error: Exception) -> ComponentFailed:
        """Return the error of a request for which a call has failed."""
        return self._plan.failed_call(slot, method, error)

    def note(self, sequence: Sequence, slot: str, method: str, error: Exception) -> SequencesFailed:
        """Note a sequence for which a call has failed, and return the exception to raise."""
        self.last = self.error(slot, method, error)
        self.found[sequence.id] = self.last
        return SequencesFailed()

    def note_some(
        self,
        sequences: Seq[Sequence],
        method: str,
        error: Exception,
        call: Callable[[list[Sequence]], object],
    ) -> SequencesFailed:
        """Note the sequences for which a call of the policy over several has failed.

        A policy has no state, so the call may be repeated for each sequence alone. If it fails for
        none of them, the sequence that arrived last is noted.

        Args:
            sequences: the sequences of the call, at least one.
            method: name of the policy's method.
            error: the exception of the call.
            call: the call with other sequences.

        Returns:
            The exception to raise.
        """
        together = self.error("policy", method, error)
        for sequence in sequences:
            try:
                call([sequence])
            except Exception as alone:
                self.note(sequence, "policy", method, alone)
        if not self.found:
            newest = max(sequences, key=lambda sequence: (sequence.arrival, sequence.id))
            self.note(newest, "policy", method, together)
        return SequencesFailed()
