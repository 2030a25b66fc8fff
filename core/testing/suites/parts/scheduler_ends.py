"""Conformance tests of the ``scheduler`` slot: refusals, aborts, deadlines and bad rows."""

from __future__ import annotations

import random

import pytest

from glowplug.core.errors import QueueFull, RequestError
from glowplug.core.testing.harness.drive import Drive, sequence
from glowplug.core.testing.suites.parts.scheduler_base import ManualClock, SchedulerBase, prompt


class SchedulerEndsSuite(SchedulerBase):
    """Tests of requests that are refused, or ended before they are complete."""

    # ---- refusals --------------------------------------------------------------------------------

    def test_a_prompt_as_long_as_the_context_is_refused(self) -> None:
        drive = self.drive(context_length=32)
        with pytest.raises(RequestError) as caught:
            drive.add(sequence(1, [1] * 32))
        assert caught.value.code == "context_length_exceeded" and caught.value.status == 400
        assert "32" in str(caught.value)
        self.run(drive, [sequence(2, [1] * 31)])

    def test_a_sequence_larger_than_the_pool_is_refused(self) -> None:
        drive = self.drive(num_pages=6)  # 5 pages of 4
        with pytest.raises(RequestError) as caught:
            drive.add(sequence(1, [1] * 10, max_tokens=12))
        assert caught.value.code == "kv_too_small" and "20" in str(caught.value)
        self.run(drive, [sequence(2, [1] * 10, max_tokens=11)])

    def test_the_queue_is_bounded(self) -> None:
        drive = self.drive(max_running=2, max_queued=3)
        sequences = [sequence(i, [i + 1] * 5) for i in range(5)]
        for one in sequences:
            drive.add(one)
        with pytest.raises(QueueFull) as caught:
            drive.add(sequence(9, [1]))
        assert caught.value.status == 429 and caught.value.retry_after >= 1
        drive.run()
        self.expect(drive, sequences)
        self.run(drive, [sequence(10, [1])])

    # ---- ends from outside -----------------------------------------------------------------------

    @pytest.mark.parametrize("steps", range(9))
    @pytest.mark.parametrize("reason", ["abort", "stop"])
    def test_abort_at_any_moment(self, steps: int, reason: str) -> None:
        """An abort after any step frees the pages and does not change other sequences.

        The aborted sequences are queued, prefilling (in three chunks), decoding or in flight.
        """
        rng = random.Random(steps)
        drive = self.drive(max_running=2)
        sequences = [sequence(i, prompt(rng, 40), max_tokens=6) for i in range(4)]
        for one in sequences:
            drive.add(one)
        for _ in range(steps):
            drive.step()
        output = drive.abort(0, 3, reason=reason)
        assert output is not None and [end.id for end in output.finished] == [0, 3]
        assert {end.reason for end in output.finished} == {reason}
        drive.run()
        self.expect(drive, sequences[1:3])

    def test_abort_of_the_unknown_is_nothing(self) -> None:
        drive = self.drive()
        assert drive.abort(5, 6) is None
        self.run(drive, [sequence(1, [1, 2, 3])])
        assert drive.abort(1) is None

    def test_a_bad_row_costs_only_itself(self) -> None:
        rng = random.Random(0)
        drive = self.drive(bad=(2, 3))
        sequences = [sequence(i, prompt(rng, 12)) for i in range(4)]
        for one in sequences:
            drive.add(one)
        drive.run()
        finished = drive.seen[2].finished
        assert finished is not None and (finished.reason, finished.error_code) == (
            "error",
            "nan_logits",
        )
        assert len(drive.seen[2].tokens) == 2
        self.expect(drive, [sequences[0], sequences[1], sequences[3]])

    def test_deadlines(self) -> None:
        clock = ManualClock()
        drive = self.drive(clock=clock, max_running=1)
        free = sequence(1, [1] * 5, max_tokens=40, arrival=clock.now)
        queued = sequence(2, [2] * 5, arrival=clock.now, queue_timeout=5.0)
        total = sequence(3, [3] * 5, arrival=clock.now, timeout=9.0)
        for one in (free, queued, total):
            drive.add(one)
        drive.step()
        clock.now += 6
        drive.step()
        self.ended(drive, 2, "timeout")
        assert drive.seen[3].finished is None
        clock.now += 6
        drive.run()
        self.ended(drive, 3, "timeout")
        self.expect(drive, [free])

    def test_a_running_sequence_meets_its_deadline(self) -> None:
        clock = ManualClock()
        drive = self.drive(clock=clock)
        drive.add(
            sequence(1, [1] * 5, max_tokens=40, arrival=clock.now, timeout=5.0, queue_timeout=1.0)
        )
        for _ in range(4):
            drive.step()
        clock.now += 2
        drive.step()
        assert drive.seen[1].finished is None, "the queue timeout must not end a running sequence"
        clock.now += 4
        drive.run()
        self.ended(drive, 1, "timeout")
        assert drive.seen[1].tokens

    @staticmethod
    def ended(drive: Drive, id: int, reason: str) -> None:
        finished = drive.seen[id].finished
        assert finished is not None and finished.reason == reason and finished.error

    def test_admission_is_reported_once_with_its_wait(self) -> None:
        clock = ManualClock()
        drive = self.drive(clock=clock, max_running=1)
        for i in range(2):
            drive.add(sequence(i, [i + 1] * 5, arrival=clock.now))
        drive.step()
        clock.now += 3
        drive.run()
        waits = [seen.admitted.queued for seen in drive.seen.values() if seen.admitted is not None]
        assert sorted(waits) == [0.0, 3.0]
