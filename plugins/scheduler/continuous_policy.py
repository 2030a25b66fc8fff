"""The continuous scheduler's calls of its policy: victims, held and rejected sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq

from glowplug.core.errors import RequestError
from glowplug.core.protocols import MOST_OVERTAKEN, SchedulingPolicy
from glowplug.core.step.messages import Stats
from glowplug.core.step.request import Sequence
from glowplug.plugins.scheduler.continuous_admission import Admitter
from glowplug.plugins.scheduler.continuous_faults import SequencesFailed
from glowplug.plugins.scheduler.continuous_rows import Rows


class PolicyCalls:
    """The calls of a policy beside ``order``, and their effects on queue and rows.

    A call that raises an exception ends sequences, see ``Faults``.
    """

    def __init__(
        self, policy: SchedulingPolicy, rows: Rows, admission: Admitter, stats: Stats
    ) -> None:
        self._policy = policy
        self._rows = rows
        self._queue = admission.queue
        self._admission = admission
        self._stats = stats
        self._faults = rows.faults
        self._holds: Callable[[Sequence], float] | None = getattr(policy, "hold", None)
        self._reject: Callable[[Seq[Sequence]], Mapping[int, RequestError]] | None = getattr(
            policy, "reject", None
        )
        self._preempts: Callable[[Sequence, Seq[Sequence]], Sequence | None] | None = getattr(
            policy, "preempts", None
        )

    def hold(self, sequence: Sequence) -> None:
        """Set the time before which a new sequence is not admitted.

        Raises:
            RequestError: the policy refuses the sequence, or fails.
        """
        if self._holds is None:
            return
        try:
            sequence.held_until = self._holds(sequence)
        except RequestError:
            raise
        except Exception as error:
            raise self._faults.error("policy", "hold", error) from error
        self._admission.held.add(sequence.id)

    def rejected(self) -> Iterator[tuple[int, RequestError]]:
        """Yield the waiting sequences that the policy rejects, with the error."""
        if self._reject is None or not len(self._queue):
            return
        waiting = self._queue.sequences()
        try:
            rejected = self._reject(waiting)
        except Exception as error:
            raise self._faults.note_some(waiting, "reject", error, self._reject) from error
        for id, reason in rejected.items():
            if id in self._queue:
                yield id, reason
            else:
                self._faults.complain("rejected a sequence that is not waiting: it goes on")

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
        try:
            victim = self._preempts(first, running)
        except Exception as error:
            raise self._faults.note(first, "policy", "preempts", error) from error
        if victim is None:
            return True
        if not any(victim is one for one in running):
            self._faults.complain("preempts a sequence that is not running: none is preempted")
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
        choose = self._policy.victim
        try:
            sequence = choose(running)
        except Exception as error:
            raise self._faults.note_some(running, "victim", error, choose) from error
        if not any(sequence is one for one in running):
            self._faults.complain(
                "chose a victim that is not running: the newest is preempted instead"
            )
            sequence = running[-1]
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence's row and pages, and queue it again."""
        self._rows.release(sequence.row)
        self._admission.retry()
        if self._faults.found:
            raise SequencesFailed
        sequence.preemptions += 1
        self._stats.preemptions += 1
        self._queue.put_back(sequence)
