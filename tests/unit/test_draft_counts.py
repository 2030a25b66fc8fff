"""Counts of verified drafts: figures, snapshots, groups, the meter of an engine's steps, and the
warning when acceptance falls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from glowplug.core.engine.draft_meter import (
    FALLEN_SHARE,
    LEAST_FALL,
    RECOVERED_SHARE,
    WATCHED_STEPS,
    DraftMeter,
    FallWatch,
)
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch, StepResult, idle_batch
from glowplug.core.step.draft_counts import Acceptance, DraftCounts, since, summed
from glowplug.core.step.messages import Stats, StepOutput, decode_outbound, encode, total
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.testing.harness.drive import sequence
from glowplug.entrypoints.front.recent_drafts import RecentDrafts
from glowplug.entrypoints.server.logs import stats_line

CHAIN, TREE, NONE = DraftShape(3, 1, 4), DraftShape(2, 4, 6), DraftShape(0, 1, 1)


# ---- figures -------------------------------------------------------------------------------------


def test_figures_of_a_chain() -> None:
    found = Acceptance([DraftCounts(3, 1, 4, engine_steps=5, accepted=[10, 5, 3, 2])])
    assert (found.verify_steps, found.drafted, found.accepted) == (20, 60, 17)
    assert found.length == pytest.approx(1 + 17 / 20)
    assert found.rate == pytest.approx(17 / 60)
    assert found.rates == pytest.approx([10 / 20, 5 / 20, 2 / 20])


def test_shallower_drafts_do_not_lower_the_rates_of_deeper_ones() -> None:
    """A tree of two passes has no third position, and a step without drafts verifies nothing."""
    counts = [
        DraftCounts(3, 1, 4, 1, [0, 0, 0, 4]),
        DraftCounts(2, 4, 6, 1, [6, 0, 0]),
        DraftCounts(0, 1, 1, 9),
    ]
    found = Acceptance(counts)
    assert (found.verify_steps, found.drafted, found.accepted) == (10, 4 * 3 + 6 * 5, 12)
    assert found.rates == pytest.approx([0.4, 0.4, 1.0])
    nothing = Acceptance(counts[2:])
    assert (nothing.length, nothing.rate, nothing.rates) == (None, None, [])


def test_groups_and_snapshots_are_combined_by_shape() -> None:
    one = [DraftCounts(3, 1, 4, 2, [5, 1, 0, 0]), DraftCounts(0, 1, 1, 7)]
    other = [DraftCounts(2, 4, 6, 1, [1, 1, 1]), DraftCounts(3, 1, 4, 1, [0, 0, 0, 2])]
    both = summed([one, other])
    assert both == [
        DraftCounts(3, 1, 4, 3, [5, 1, 0, 2]),
        DraftCounts(0, 1, 1, 7),
        DraftCounts(2, 4, 6, 1, [1, 1, 1]),
    ]
    assert since(both, one) == [
        DraftCounts(3, 1, 4, 1, [0, 0, 0, 2]),
        DraftCounts(0, 1, 1, 0),
        DraftCounts(2, 4, 6, 1, [1, 1, 1]),
    ]
    whole = total([Stats(drafts=one, drafted_tokens=4), Stats(drafts=other, group=1)])
    assert whole.drafts == both and whole.drafted_tokens == 4
    assert one == [DraftCounts(3, 1, 4, 2, [5, 1, 0, 0]), DraftCounts(0, 1, 1, 7)], "unchanged"


def test_counters_cross_processes() -> None:
    sent = StepOutput(
        stats=Stats(drafts=[DraftCounts(2, 4, 6, 1, [1, 1, 1])]), drafts=5, prompted=[3]
    )
    (received,) = decode_outbound(encode([sent]))
    assert received == sent


def test_the_last_minute_leaves_earlier_steps_out() -> None:
    recent = RecentDrafts()

    def at(seconds: float) -> list[DraftCounts]:
        return [DraftCounts(1, 1, 2, int(seconds), [int(seconds), int(seconds)])]

    assert recent.counts(0.0, []) == []
    for tenth in range(2000):
        recent.note(tenth / 10, at(tenth / 10))
    (found,) = recent.counts(200.0, at(200.0))
    assert 60 <= found.engine_steps <= 62
    (found,) = recent.counts(230.0, at(200.0))
    assert 30 <= found.engine_steps <= 32, "half of the minute was idle"
    (found,) = recent.counts(400.0, at(200.0))
    assert found.engine_steps <= 1, "nothing ran for longer than a minute"


def test_the_log_line_has_the_accept_length_since_the_last_one() -> None:
    before = Stats(busy_seconds=1.0, drafts=[DraftCounts(1, 1, 2, 1, [100, 0])])
    now = Stats(busy_seconds=2.0, output_tokens=7, drafts=[DraftCounts(1, 1, 2, 4, [101, 3])])
    assert "accept length 1.75" in (stats_line(before, now, [now]) or "")
    plain = Stats(busy_seconds=2.0, output_tokens=7)
    assert "accept" not in (stats_line(Stats(), plain, [plain]) or "")


# ---- the meter of an engine's steps --------------------------------------------------------------


class Meter:
    """A meter over a table whose rows 0 to 7 hold the sequences 10 to 17."""

    def __init__(self, shape: DraftShape = CHAIN) -> None:
        self.table = SequenceTable(8, 64, 4)
        for number in range(8):
            assert self.table.join(sequence(10 + number, [1, 2])) == number
        self.meter = DraftMeter(shape, self.table)

    def step(
        self,
        gained: Sequence[int],
        *,
        prompts: Sequence[int] = (),
        ends: Sequence[bool] = (),
        bad: Sequence[int] = (),
        stale: Sequence[int] = (),
        shape: DraftShape | None = None,
        given: Sequence[int] | None = None,
    ) -> tuple[int, list[int]]:
        """Count a step whose rows 0.. gain ``gained`` tokens, followed by the rows ``prompts``,
        whose prompts end where ``ends`` is True. The rows 0.. have ``given`` drafts.
        """
        decodes = len(gained)
        rows = np.array([*range(decodes), *prompts], np.int32)
        batch: Batch = idle_batch(1)
        batch.mode = Mode.VERIFY
        batch.rows, batch.num_decodes = rows, decodes
        batch.epochs = self.table.epoch[rows] - np.isin(rows, stale)
        batch.samples = np.array([True] * decodes + list(ends), np.bool_)
        batch.draft_shape = shape
        counts = np.array([*gained, *(int(end) for end in ends)], np.int32)
        result = StepResult(np.zeros((len(rows), 4), np.int64), counts, np.isin(rows, bad))
        result.drafts = None if given is None else np.array(given, np.int32)
        drafts, prompted, self.fewer = self.meter.done(batch, result)
        return drafts, prompted

    @property
    def stats(self) -> Stats:
        stats = Stats()
        self.meter.fill(stats)
        return stats


def test_prompts_do_not_count_as_verify_steps() -> None:
    meter = Meter()
    assert meter.step([1, 4, 2], prompts=[5, 6, 7], ends=[True, False, True]) == (3, [15, 17])
    assert meter.step([], prompts=[5], ends=[True]) == (0, [])
    assert meter.stats.drafts == [DraftCounts(3, 1, 4, 1, [1, 1, 0, 1])]
    assert (meter.stats.drafted_tokens, meter.stats.accepted_tokens) == (9, 4)


def test_rows_that_left_failed_or_gained_nothing_do_not_count() -> None:
    """A row that ended or was aborted since the launch is stale; one without a token is faulty."""
    meter = Meter()
    assert meter.step([4, 3, 2, 0], bad=[1], stale=[0]) == (3, [])
    assert meter.step([4], prompts=[6, 7], ends=[True, True], stale=[6]) == (3, [17])
    assert meter.stats.drafts == [DraftCounts(3, 1, 4, 2, [0, 1, 0, 1])]


def test_a_snapshot_does_not_grow_with_later_steps() -> None:
    meter = Meter()
    meter.step([2])
    before = meter.stats
    meter.step([2, 2])
    assert before.drafts == [DraftCounts(3, 1, 4, 1, [0, 1, 0, 0])]
    assert meter.stats.drafts == [DraftCounts(3, 1, 4, 2, [0, 3, 0, 0])]


def test_each_shape_has_its_own_counters() -> None:
    meter = Meter()
    assert meter.step([1, 3], shape=TREE) == (5, [])
    assert meter.step([1, 1], shape=NONE) == (0, [])
    assert meter.step([4]) == (3, [])
    assert meter.stats.drafts == [
        DraftCounts(2, 4, 6, 1, [1, 0, 1]),
        DraftCounts(0, 1, 1, 1),
        DraftCounts(3, 1, 4, 1, [0, 0, 0, 1]),
    ]
    assert meter.stats.drafted_tokens == 2 * 5 + 3


def test_rows_with_fewer_drafts_count_those_that_they_have() -> None:
    meter = Meter()
    meter.step([1, 2, 4, 1], given=[0, 2, 3, 1])
    assert meter.fewer == {10: 0, 11: 2, 13: 1}
    meter.step([2, 1, 3], given=[1, 3, 2], stale=[0], bad=[2])
    assert meter.fewer == {12: 2}
    meter.step([1], given=[0])
    meter.step([3])
    # of rows with 2, 3, 1, 3 and 3 drafts, 1, 3, 0, 0 and 2 were accepted
    assert meter.stats.drafts == [DraftCounts(3, 1, 4, 4, [2, 1, 1, 1], [0, 1, 2])]
    assert (meter.stats.drafted_tokens, meter.stats.accepted_tokens) == (12, 6)
    found = Acceptance(meter.stats.drafts)
    assert (found.verify_steps, found.proposed_at) == (5, [5, 4, 3])
    assert found.accepted_at == [3, 2, 1]
    assert found.rates == [3 / 5, 2 / 4, 1 / 3]


def test_an_engine_without_drafts_counts_nothing() -> None:
    meter = Meter(NONE)
    assert meter.step([1, 1], prompts=[5], ends=[True]) == (0, [])
    assert meter.stats == Stats()


# ---- falls ---------------------------------------------------------------------------------------


def watched(*parts: tuple[float, int]) -> list[int]:
    """Return the verify steps after which a watch reports a fall.

    Args:
        parts: (accepted drafts per step, verify steps) one after the other, ten rows at a time.
    """
    watch, found, at = FallWatch(), [], 0
    for mean, steps in parts:
        for _ in range(steps // 10):
            at += 10
            if watch.add(10, round(10 * mean)):
                found.append(at)
    return found


def test_a_fall_is_reported_once_and_again_after_a_recovery() -> None:
    many = 2 * WATCHED_STEPS
    (fall,) = watched((0.9, many), (0.0, many))
    assert many < fall <= many + WATCHED_STEPS
    assert len(watched((0.9, many), (0.0, many), (0.9, many), (0.0, many))) == 2
    between = (FALLEN_SHARE + RECOVERED_SHARE) / 2 * 0.9
    assert len(watched((0.9, many), (0.0, many), (between, many), (0.0, many))) == 1


def test_small_falls_are_not_reported() -> None:
    many = 2 * WATCHED_STEPS
    assert watched((2.0, many), (2.0 * FALLEN_SHARE + 0.1, many)) == []
    assert watched((LEAST_FALL - 0.1, many), (0.0, many)) == []
    assert watched((0.9, WATCHED_STEPS // 2), (0.0, WATCHED_STEPS // 4)) == [], "too few steps"


def test_a_fall_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter()
    with caplog.at_level(logging.WARNING, "glowplug.engine"):
        for _ in range(WATCHED_STEPS // 8):
            meter.step([3] * 8)
        assert not caplog.records and meter.stats.acceptance_falls == 0
        # another shape is compared with its own start
        for _ in range(WATCHED_STEPS // 8):
            meter.step([1] * 8, shape=TREE)
        assert not caplog.records
        for _ in range(WATCHED_STEPS // 4):
            meter.step([1] * 8)
    (record,) = caplog.records
    assert "the acceptance of drafts has fallen: 1." in record.getMessage()
    assert "3/1/4" in record.getMessage() and "3.00 in the first" in record.getMessage()
    assert meter.stats.acceptance_falls == 1
