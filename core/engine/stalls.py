"""Detection of requests that a faulty component would hold for ever.

Two contracts keep a request moving. If no step is in flight and a sequence waits or runs, the
scheduler has a step to launch. Every row that samples gains at least one token. A policy that
orders nothing, a scheduler that launches nothing or an algorithm that accepts nothing breaks them
without an exception. :class:`StallWatch` counts turns and steps in which nothing moved, and names
the component and the requests to end.

Every rank of a group decides alike, from its scheduler's batches, the results of steps and the
common clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.loading import BUILT_IN, component_fix
from glowplug.core.protocols import SchedulingPolicy
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.messages import Finished, Stats, StepOutput
from glowplug.core.step.request import Sequence
from glowplug.core.step.sequence_table import SequenceTable

STALL_TURNS = 100  #: least number of turns without a step after which requests are ended
#: least seconds without a step after which requests are ended; a turn without a step takes
#: microseconds
STALL_SECONDS = 1.0
TOKENLESS_STEPS = 8  #: consecutive steps without a token after which a sampling row is ended
CODE = "stalled"  #: error code of the sequences that are ended


@dataclass(frozen=True)
class Stall:
    """Sequences to end, and the reason, which names the faulty component."""

    ids: list[int]
    reason: str

    def ends(self, ended: StepOutput | None) -> StepOutput:
        """Return the ends of the sequences.

        Args:
            ended: the scheduler's output; sequences that it has lost are not in it.
        """
        output = ended or StepOutput()
        known = {end.id for end in output.finished}
        output.finished += [Finished(id, "error") for id in self.ids if id not in known]
        for end in output.finished:
            if end.error_code is None:
                end.error = f"the engine has ended the request: {self.reason}"
                end.error_code = CODE
        return output


def fix(plan: EnginePlan, slot: str) -> str:
    """Return the end of a reason: the phase, and what helps against a fault of ``slot``."""
    origin = next(
        ((one.distribution, one.version) for one in plan.choices_in(slot)), (BUILT_IN, "")
    )
    return f" (phase serve; fix: {component_fix(slot, *origin)})"


class StallWatch:
    """A watch over one group's scheduler and results. One thread uses it.

    Attributes:
        live: sequences that the scheduler has taken and not ended, by id.
    """

    def __init__(self, plan: EnginePlan, policy: SchedulingPolicy, table: SequenceTable) -> None:
        self._plan = plan
        self._policy = policy
        self._table = table
        self.live: dict[int, Sequence] = {}
        self._turns = 0  # consecutive turns without a step although there was work
        self._since = 0.0  # time of the first of these turns, in seconds
        # row -> (its epoch, consecutive steps without a token)
        self._tokenless: dict[int, tuple[int, int]] = {}

    def ended(self, finished: Iterable[Finished]) -> None:
        """Forget sequences that have ended."""
        for end in finished:
            self.live.pop(end.id, None)

    # ---- turns -----------------------------------------------------------------------------------

    def moved(self) -> None:
        """Record a turn in which a step was launched or in flight, or there was no work."""
        self._turns = 0

    def still(self, now: float, load: Stats) -> Stall | None:
        """Record a turn with work for the scheduler in which no step was launched or in flight.

        Args:
            now: seconds, the same on every rank.
            load: the scheduler's present load.

        Returns:
            All live sequences with the reason, once both ``STALL_TURNS`` and ``STALL_SECONDS`` are
            exceeded; else None.
        """
        if not self._turns or any(one.held_until > now for one in self.live.values()):
            self._since = now
        self._turns += 1
        waited = now - self._since
        if self._turns < STALL_TURNS or waited < STALL_SECONDS or not self.live:
            return None
        reason = f"no step was launched or in flight for {waited:.1f} s: {self._holder(load)}"
        self._turns = 0
        return Stall(list(self.live), reason)

    def _holder(self, load: Stats) -> str:
        """Return the text that names the component which holds the requests, with a fix.

        The policy has no state, so one more call of its ``order`` shows whether it leaves requests
        out.
        """
        waiting = [sequence for sequence in self.live.values() if sequence.row < 0]
        policy, scheduler, cache = (
            self._plan.title(slot) for slot in ("policy", "scheduler", "cache")
        )
        left_out = self._left_out(waiting)
        if left_out and len(waiting) == len(self.live):
            return (
                f"{policy} leaves {left_out} of {len(waiting)} waiting requests out of its order"
                + fix(self._plan, "policy")
            )
        return (
            f"{scheduler} with {policy} and {cache} holds {len(self.live)} requests, "
            f"{len(waiting)} of them waiting; of {load.pages_total} pages {load.pages_free} are "
            f"free and {load.pages_evictable} evictable{fix(self._plan, 'scheduler')}"
        )

    def _left_out(self, waiting: list[Sequence]) -> int:
        """Return the number of ``waiting`` sequences that the policy leaves out; 0 if it raises."""
        try:
            ordered = self._policy.order(
                list(waiting), dict.fromkeys((sequence.id for sequence in waiting), 0)
            )
            kept = {id(sequence) for sequence in ordered}
        except Exception:
            return 0
        return sum(id(sequence) not in kept for sequence in waiting)

    # ---- steps -----------------------------------------------------------------------------------

    def stepped(self, batch: Batch, result: StepResult, output: StepOutput) -> Stall | None:
        """Record the result of a committed step and its output.

        Returns:
            The sequences that gained no token in ``TOKENLESS_STEPS`` consecutive steps, with the
            reason; None if there are none.
        """
        # most steps end here: each row is in the output, with one token. Comparing the arrays takes
        # 1.2 us more
        if len(output.ids) == len(batch.rows) and not (output.counts or self._tokenless):
            return None
        if not self._tokenless and np.greater_equal(result.counts, batch.samples).all():
            return None
        found = self._without_tokens(batch, result)
        if not found:
            return None
        reason = (
            f"{TOKENLESS_STEPS} consecutive steps yielded no token: "
            f"{self._plan.title('speculative')} accepts none"
            f"{fix(self._plan, 'speculative')}"
        )
        return Stall(found, reason)

    def _without_tokens(self, batch: Batch, result: StepResult) -> list[int]:
        """Update each row's number of consecutive steps without a token.

        Returns:
            Ids of the sequences whose number has reached ``TOKENLESS_STEPS``.
        """
        current = self._table.epoch[batch.rows] == batch.epochs
        self._tokenless = {
            row: held for row, held in self._tokenless.items() if held[0] == self._table.epoch[row]
        }
        found = []
        for i in np.flatnonzero(batch.samples & current).tolist():
            row = int(batch.rows[i])
            epoch = int(batch.epochs[i])
            if result.counts[i] > 0 or result.bad[i]:
                self._tokenless.pop(row, None)
                continue
            steps = self._tokenless.get(row, (epoch, 0))[1] + 1
            self._tokenless[row] = epoch, steps
            sequence = self._table.sequences[row]
            if steps >= TOKENLESS_STEPS and sequence is not None:
                found.append(sequence.id)
        return found
