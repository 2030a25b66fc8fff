"""The engine's own measurements: busy time, the phases of a sequence, tokens found in the prefix
cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.step.messages import Admitted, Finished, Stats, StepOutput, total
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit
from glowplug.entrypoints.front.delta import Delta, Times
from glowplug.entrypoints.front.front import Front
from glowplug.entrypoints.server.logs import stats_line
from tests.support.tiny import VOCAB, write_config

PAGE = 4


def config(folder: Path, **more: Any) -> dict[str, Any]:
    base = {
        "model": str(write_config(folder, "v3")),
        "weights": {"use": "random"},
        "device": "cpu",
        "skip_tokenizer": True,
        "dtype": "float32",
        "context_length": 96,
        "memory": {"kv_tokens": 512},
        "attention": {"page_size": PAGE},
    }
    return {**base, **more}


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(**config(tmp_path, scheduler={"max_running_requests": 1, "chunk_size": 8})) as one:
        yield one


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


def lasts(llm: LLM, count: int) -> list[Delta]:
    """Return the last deltas of the next ``count`` sequences that end, in this order."""
    found: list[Delta] = []
    while len(found) < count:
        found += [delta for _, delta in llm.poll() if delta.finish_reason is not None]
    return found


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


# ---- busy time -----------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("overlap", [True, False])
def test_idle_time_is_not_busy_time(tmp_path: Path, overlap: bool) -> None:
    with LLM(**config(tmp_path, scheduler={"overlap": overlap})) as llm:
        started = time.perf_counter()
        llm.generate([prompt(1, 20)], GREEDY)
        first = llm.stats.busy_seconds
        time.sleep(0.3)
        llm.generate([prompt(2, 20)], GREEDY)
        wall = time.perf_counter() - started
        assert 0 < first < llm.stats.busy_seconds <= wall - 0.3


def test_a_group_s_busy_time_is_that_of_all_groups(tmp_path: Path) -> None:
    """One request keeps one group busy; the other's report must not make the engine look idle or
    twice as busy.
    """
    parallel = [{"use": "tensor", "size": 2}, {"use": "dp_attention", "size": 2}]
    with RankSet(rank_plan(config(tmp_path, parallel=parallel))) as ranks:
        ranks.run([submit(1, prompt(1, 20), 20)])
        one, other = ranks.stats[0], ranks.stats[1]
        assert other.step_seconds == 0 and 0 < other.busy_seconds
        whole = total(ranks.stats.values())
        assert whole.busy_seconds == max(one.busy_seconds, other.busy_seconds)
        assert whole.step_seconds == one.step_seconds


def test_the_line_s_rates_leave_idle_time_out() -> None:
    last = Stats(
        prompt_tokens=1000, output_tokens=400, busy_seconds=7.0, pages_total=10, pages_free=10
    )
    now = Stats(
        prompt_tokens=1200,
        output_tokens=500,
        busy_seconds=9.0,
        pages_total=10,
        pages_free=5,
        running=2,
        prefix_query_tokens=200,
        prefix_hit_tokens=50,
        prefix_queries=2,
        prefix_hits=2,
    )
    line = stats_line(last, now, [now])
    assert line == (
        "prompt 100.0 tok/s, output 50.0 tok/s in 2.0 s busy, running 2, waiting 0, KV 50.0%, "
        "prefix hits 25.0%"
    )
    assert stats_line(now, now, [now]) is None
    admitted = Stats(prompt_tokens=1300, output_tokens=500, busy_seconds=9.0)
    assert stats_line(now, admitted, [admitted]) is None, (
        "no step has ended yet, so there is no rate"
    )
    assert "by group 2+2" in (stats_line(last, now, [now, now]) or "")


# ---- phases --------------------------------------------------------------------------------------


@pytest.mark.timing
def test_a_sequence_s_phases_follow_one_another(llm: LLM) -> None:
    """There is one row: the second sequence is admitted when the first has ended, so it has waited
    through the first's phases.
    """
    for seed in (1, 2):
        llm.submit(prompt(seed, 40), GREEDY)
    started = time.monotonic()
    first, second = lasts(llm, 2)
    wall = time.monotonic() - started
    for one in (first, second):
        assert (
            one.times.prefill is not None
            and one.times.decode is not None
            and one.times.queue is not None
        )
        assert one.times.prefill > 0 and one.times.decode > 0
    assert (
        first.times.prefill is not None
        and first.times.decode is not None
        and second.times.queue is not None
    )
    assert second.times.queue >= first.times.prefill + first.times.decode
    assert sum(part or 0.0 for part in second.times) <= wall


def test_phases_that_were_not_reached_have_no_time() -> None:
    """Sequences end while they wait, while their prompt is computed, and with their first token."""
    front = Front(bare_plan(), None, ())
    ids = [front.submit(front.check([5, 6, 7], GREEDY))[0].id for _ in range(3)]
    waits, prefills, ends = ids
    front.receive([StepOutput(admitted=[Admitted(prefills, 0.5, 0), Admitted(ends, 0.25, 0)])])
    received = front.receive(
        [
            StepOutput(
                ids=[ends],
                tokens=[9],
                prefilled=[(ends, 2.0)],
                finished=[
                    Finished(waits, "timeout"),
                    Finished(prefills, "abort"),
                    Finished(ends, "length"),
                ],
            )
        ]
    )
    assert {stream.id: delta.times for stream, delta in received.deltas} == {
        waits: Times(),
        prefills: Times(queue=0.5),
        ends: Times(0.25, 2.0, 0.0),
    }


def test_a_stop_string_s_end_has_its_phases() -> None:
    """The front ends such a sequence by itself, before the engine does."""
    with LLM(model="embedded", memory={"kv_tokens": 2048}, context_length=256) as llm:
        plain = llm.generate(["What is 17 + 25?"], SamplingParams(temperature=0.0, max_tokens=8))[
            0
        ].text
        stop = plain.strip()[:1]
        llm.submit("What is 17 + 25?", SamplingParams(temperature=0.0, max_tokens=8, stop=[stop]))
        (one,) = lasts(llm, 1)
    assert one.stop_reason == stop and None not in one.times


# ---- the prefix cache ----------------------------------------------------------------------------


def test_prefix_counters_are_in_tokens_and_look_ups_apart(llm: LLM) -> None:
    """A prompt whose own log-probabilities are requested is not looked up; a preempted one is not
    counted again.
    """
    ids = prompt(1, 40)
    llm.generate([ids], GREEDY)
    llm.generate([ids], GREEDY)
    stats = llm.stats
    found = (len(ids) - 1) // PAGE * PAGE
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (80, found)
    assert (stats.prefix_queries, stats.prefix_hits) == (2, 1)
    llm.generate([ids], GREEDY.replace(prompt_logprobs=1))
    assert (llm.stats.prefix_query_tokens, llm.stats.prefix_queries) == (80, 2)


def test_preempted_sequences_are_counted_once(tmp_path: Path) -> None:
    with LLM(**config(tmp_path, memory={"kv_tokens": 100})) as llm:
        llm.generate([prompt(seed, 8) for seed in range(3)], GREEDY.replace(max_tokens=60))
        stats = llm.stats
    assert stats.preemptions > 0 and stats.prefix_query_tokens == 24
    assert stats.prefix_queries == 3 + stats.preemptions


def test_without_a_prefix_cache_nothing_is_looked_up(tmp_path: Path) -> None:
    with LLM(**config(tmp_path, cache={"use": "none"})) as llm:
        llm.generate([prompt(1, 40)] * 2, GREEDY)
        assert (llm.stats.prefix_query_tokens, llm.stats.prefix_queries) == (0, 0)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_end_of_the_last_sequence_brings_the_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """They are complete once all answers are, however short the time since the last report."""
    monkeypatch.setattr("glowplug.core.engine.engine.STATS_EVERY", 1e9)
    with LLM(**config(tmp_path, scheduler={"overlap": overlap})) as llm:
        (first,) = llm.generate([prompt(1, 40)], GREEDY)
        # a stop token ends a sequence while its next step is in flight
        stops = GREEDY.replace(stop_token_ids=[first.token_ids[3]])
        for count in (2, 3):
            llm.generate([prompt(1, 40)], stops)
            assert (llm.stats.prefix_queries, llm.stats.running) == (count, 0)
