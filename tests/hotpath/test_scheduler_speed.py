"""Host time of the scheduler at batch 256, decoding: the target is 150 us a step, the bound here
suits loaded machines.

A Python loop over the rows would take ten times the target, so a loose bound still detects one.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest

from glowplug.core.protocols import Worker
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.testing.harness.drive import sequence
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.plugins.cache.radix import RadixOptions
from glowplug.plugins.cache.radix_runtime import RadixCache
from glowplug.plugins.scheduler.continuous import ContinuousOptions
from glowplug.plugins.scheduler.continuous_runtime import Continuous
from glowplug.plugins.scheduler.policies import FcfsOptions
from glowplug.plugins.scheduler.policies_runtime import Fcfs
from tests.support.pace import slowness, yardstick

BATCH = 256


def result_of(batch: Batch) -> StepResult:
    return StepResult(
        np.full((batch.num_rows, 1), 7, np.int64),
        batch.samples.astype(np.int32),
        np.zeros(batch.num_rows, np.bool_),
    )


def decoding_scheduler(batch: int) -> Continuous:
    """Return a scheduler in which all rows decode, each with a stop id that never comes, with one
    step in flight.
    """
    plan = bare_plan(
        context_length=4096,
        page_size=64,
        num_pages=batch * 65,
        max_running=batch,
        max_queued=batch,
        chunk_size=8192,
        max_step_tokens=8192 + batch,
    )
    worker = Worker()
    scheduler = Continuous(ContinuousOptions(), plan, worker)
    scheduler.bind(
        SequenceTable(batch, 4097, 64),
        PageAllocator(batch * 65),
        RadixCache(RadixOptions(), plan, worker),
        Fcfs(FcfsOptions(), plan, worker),
    )
    for i in range(batch):
        scheduler.add(sequence(i, [i + 8] * 100, max_tokens=3000, stop_ids=frozenset([3])))
    while True:
        step = scheduler.next_batch()
        assert step is not None
        scheduler.commit(step, result_of(step))
        if step.num_decodes == batch:
            return scheduler


@pytest.mark.timing
def test_host_time_of_a_decode_step() -> None:
    scheduler = decoding_scheduler(BATCH)
    before = scheduler.next_batch()
    assert before is not None
    seconds, paces = [], []
    for number in range(1000):
        if number % 250 == 0:
            paces.append(yardstick())
        result = result_of(before)
        start = time.thread_time()
        batch = scheduler.next_batch()
        output = scheduler.commit(before, result)
        seconds.append(time.thread_time() - start)
        assert batch is not None and len(output.ids) == BATCH
        before = batch
    median, worst = np.median(seconds) * 1e6, np.quantile(seconds, 0.99) * 1e6
    print(
        f"next_batch + commit at batch {BATCH}: median {median:.0f} us, p99 {worst:.0f} us",
        file=sys.stderr,
    )
    assert median < 600 * slowness(paces)


def test_a_decode_step_runs_no_code_per_row() -> None:
    """The Python calls of a step are counted: as many at batch 64 as at batch 8, page borders
    crossed or not.
    """
    assert calls_of(8) == pytest.approx(calls_of(64), rel=0.05)


def calls_of(batch: int) -> int:
    scheduler, count = decoding_scheduler(batch), 0

    def tracer(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    pending = scheduler.next_batch()
    for _ in range(70):  # more than a page
        assert pending is not None
        result = result_of(pending)
        sys.setprofile(tracer)
        try:
            batch_after = scheduler.next_batch()
            scheduler.commit(pending, result)
        finally:
            sys.setprofile(None)
        pending = batch_after
    return count
