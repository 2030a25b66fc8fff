"""The continuous scheduler's calls of its policy: victims, held and rejected sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq

from glowplug.core.errors import RequestError
from glowplug.core.protocols import MOST_OVERTAKEN, SchedulingPolicy
from glowplug.core.step.messages import Stats
from glowplug.core.step.request import Sequence
from glowplug.plugins.scheduler.continuous_admission import Admitter
from glowplug.plugins.scheduler.continuous_queue import Queue
from glowplug.plugins.scheduler.continuous_rows import Rows

logger = logging.getLogger("glowplug.engine")


class Complaints:
    """The log of a policy's faults, each text once.

    Args:
        title: slot, name and origin of the policy.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._told: set[str] = set()

    def __call__(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.error("%s %s", self._title, what)


class PolicyCalls:
    """The calls of a policy beside ``order``, and their effects on queue and rows.

    Attributes:
        holds: the policy's ``hold``; None if it has none.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        rows: Rows,
        queue: Queue,
        admission: Admitter,
        stats: Stats,
        complain: Callable[[str], None],
    ) -> None:
        self._policy = policy
        self._rows = rows
        self._queue = queue
        self._admission = admission
        self._stats = stats
        self._complain = complain
        self.holds: Callable[[Sequence], float] | None = getattr(policy, "hold", None)
        self._reject: Callable[[Seq[Sequence]], Mapping[int, RequestError]] | None = getattr(
            policy, "reject", None
        )
        self._preempts: Callable[[Sequence, Seq[Sequence]], Sequence | None] | None = getattr(
            policy, "preempts", None
        )

    def rejected(self) -> Iterator[tuple[int, RequestError]]:
        """Yield the waiting sequences that the policy rejects, with the error."""
        if self._reject is None or not len(self._queue):
            return
        for id, error in self._reject(self._queue.sequences()).items():
            if id in self._queue:
                yield id, error
            else:
                self._complain("rejected a sequence that is not waiting: it goes on")

    def make_room(self, inflight: int) -> bool:
        """Preempt a running sequence for the first waiting one if the policy wants it.

        Returns:
            False if steps in flight have to be committed first.
        """
        if self._preempts is None or not self._admission.stuck():
            return True
        first = next(iter(self._admission.ordered()), None)
        running = [one for one in self._rows.running.values() if one.preemptions < MOST_OVERTAKEN]
        if first is None or not running:
            return True
        victim = self._preempts(first, running)
        if victim is None:
            return True
        if not any(victim is one for one in running):
            self._complain("preempts a sequence that is not running: none is preempted")
            return True
        if inflight:
            return False
        self._leave(victim)
        return True

    def preempt(self) -> None:
        """Preempt the sequence that the policy names when the pages run out."""
        running = list(self._rows.running.values())
        assert len(running) > 1, (
            "a sequence that runs alone must fit: the page accounting is broken"
        )
        sequence = self._policy.victim(running)
        if not any(sequence is one for one in running):
            self._complain("chose a victim that is not running: the newest is preempted instead")
            sequence = running[-1]
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence's row and pages, and queue it again."""
        self._rows.release(sequence.row)
        sequence.preemptions += 1
        self._stats.preemptions += 1
        self._queue.put_back(sequence)
        self._admission.retry()
