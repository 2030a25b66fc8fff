"""The sample scheduling policy of a third party: deadlines stated by requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.api import EnginePlan, RequestError
from glowplug.core.protocols import MOST_OVERTAKEN, SchedulingPolicy, Worker
from glowplug.core.step.request import Sequence
from glowplug.core.testing.harness.drive import sequence
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.policy import PolicySuite
from tests.support.tiny import write_config
from tests.thirdparty.packages import (
    FOLDER,
    MOST_LINES,
    lines_of,
    private_imports,
)

NAME = "glowplug-deadline"
PLUGIN = ["glowplug_deadline.plugin"]


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / NAME / "src"))
        yield


def policy(clock: Any = lambda: 0.0) -> Any:
    from glowplug_deadline.plugin import DeadlineOptions
    from glowplug_deadline.runtime import Deadline

    return Deadline(DeadlineOptions(), bare_plan(), Worker(clock=clock))


class TestDeadline(PolicySuite):
    def make(self, plan: EnginePlan) -> SchedulingPolicy:
        found: SchedulingPolicy = policy()
        return found


def params(tokens: int = 8, **ext: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, ext=ext or None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("llama"), "llama")


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 128,
        "memory": {"kv_tokens": 1024},
        "policy": {"use": "deadline"},
    }
    return LLM(model=str(folder), plugins=PLUGIN, **{**base, **config})


# ---- in the scheduler ----------------------------------------------------------------------------


def scheduler(clock: list[float], **sizes: Any) -> Any:
    """Return a scheduler of the built-in kind around the policy; ``clock`` has its time."""
    from glowplug.core.step.pages import PageAllocator
    from glowplug.core.step.sequence_table import SequenceTable
    from glowplug.core.testing.harness.build import make

    plan = bare_plan(**sizes)
    worker = Worker(clock=lambda: clock[0])
    made = make("scheduler", "continuous", plan, worker)
    table = SequenceTable(plan.sizes.max_running, plan.sizes.positions, plan.sizes.page_size)
    cache = make("cache", "radix", plan, worker)
    made.bind(table, PageAllocator(plan.sizes.num_pages), cache, policy(clock=lambda: clock[0]))
    return made


def timed(id: int, arrival: float = 0.0, **ext: Any) -> Sequence:
    found = sequence(id, [id + 1, 2, 3], arrival=arrival)
    found.params = found.params.replace(max_tokens=20, ext=ext)
    return found


def commit(made: Any, batch: Any) -> Any:
    """Commit a batch whose rows that sample all get token 5."""
    import numpy as np

    from glowplug.core.step.batch import StepResult

    counts = batch.samples.astype(np.int32)
    tokens = np.full((len(batch.rows), 1), 5, np.int64)
    return made.commit(batch, StepResult(tokens, counts, np.zeros(len(counts), bool)))


def ids(made: Any) -> set[int]:
    return {one.id for one in made.rows.running.values()}


def test_a_held_sequence_waits_until_its_time() -> None:
    clock = [0.0]
    made = scheduler(clock)
    made.add(timed(1, start_in=5.0))
    assert made.next_batch() is None
    made.add(timed(2))
    commit(made, made.next_batch())
    assert ids(made) == {2}
    clock[0] = 5.0
    commit(made, made.next_batch())
    assert ids(made) == {1, 2}


def test_a_rejected_sequence_ends_with_the_policy_s_error() -> None:
    clock = [0.0]
    made = scheduler(clock, max_running=1)
    made.add(timed(1, deadline=100.0))
    commit(made, made.next_batch())
    made.add(timed(2, deadline=100.5))
    commit(made, made.next_batch())
    clock[0] = 101.0
    (end,) = commit(made, made.next_batch()).finished
    assert (end.id, end.reason, end.error_code) == (2, "error", "deadline")
    assert end.error == "the deadline has passed" and ids(made) == {1}


def test_an_urgent_sequence_takes_the_row_of_one_with_more_time() -> None:
    clock = [0.0]
    made = scheduler(clock, max_running=1)
    made.add(timed(1, deadline=100.0))
    commit(made, made.next_batch())
    in_flight = made.next_batch()
    made.add(timed(2, deadline=5.0))
    assert made.next_batch() is None, "steps in flight have to be committed first"
    commit(made, in_flight)
    commit(made, made.next_batch())
    assert ids(made) == {2} and made.stats.preemptions == 1


def test_a_sequence_gives_way_a_bounded_number_of_times() -> None:
    clock = [0.0]
    made = scheduler(clock, max_running=1)
    patient = timed(0, deadline=1000.0)
    made.add(patient)
    for id in range(1, MOST_OVERTAKEN + 3):
        for _ in range(3):
            batch = made.next_batch()
            if batch is not None:
                commit(made, batch)
        made.add(timed(id, deadline=500.0 - 10 * id))
    for _ in range(400):
        batch = made.next_batch()
        if batch is not None:
            commit(made, batch)
    assert patient.preemptions <= MOST_OVERTAKEN and not ids(made) and not len(made.queue)


# ---- in the engine -------------------------------------------------------------------------------


def test_fields_of_requests_are_checked_before_they_are_taken(folder: Path) -> None:
    with engine(folder) as llm:
        assert len(llm.generate([[2, 3]], params(deadline=60))[0].token_ids) == 8
        for ext, reason in (
            ({"deadlin": 3}, "did you mean 'deadline'"),
            ({"deadline": -1}, "greater than 0"),
            ({"deadline": "soon"}, "ext.deadline"),
        ):
            with pytest.raises(RequestError, match=reason) as caught:
                llm.generate([[2, 3]], params(**ext))
            assert str(caught.value.param).startswith("ext.deadlin")
    with (
        engine(folder, policy={"use": "fcfs"}) as llm,
        pytest.raises(RequestError, match="no component of this engine has fields"),
    ):
        llm.generate([[2, 3]], params(deadline=60))


def test_held_requests_are_no_stall(folder: Path) -> None:
    """Nothing runs for longer than the watch for stalls waits, and the request is still served."""
    with engine(folder) as llm:
        (answer,) = llm.generate([[2, 3]], params(start_in=1.3))
        assert answer.finish_reason == "length" and len(answer.token_ids) == 8


def test_a_request_that_waited_too_long_ends_with_the_policy_s_error(folder: Path) -> None:
    with engine(folder, scheduler={"max_running_requests": 1}) as llm:
        first, late = llm.generate(
            [[2, 3], [4, 5]], [params(100, deadline=0.5), params(deadline=0.6, start_in=0.7)]
        )
        assert len(first.token_ids) == 100
        assert (late.finish_reason, late.error) == ("error", "the deadline has passed")


def test_the_sample_is_small_and_imports_the_public_interface_only() -> None:
    assert private_imports(NAME) == []
    assert lines_of(NAME) <= MOST_LINES
