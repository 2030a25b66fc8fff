"""Data-parallel groups in one engine: distribution of requests, reports to the front, and results
that do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM
from glowplug.core.engine.engine import Engine
from glowplug.core.engine.in_flight import InFlight
from glowplug.core.engine.runner import Runner
from glowplug.core.plugin.offers import Mode
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.batch import Batch
from glowplug.core.step.messages import Abort, Control, Inbound, Reply, Stats, StepOutput, Submit
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, run_ranks, submit
from tests.support.slow_cases import some_slow_rows
from tests.support.tiny import VOCAB, write_config

MESHES = [(2, 2), (4, 2), (4, 4)]
CONTEXT = 96
SCORED = 5  #: the request of ``mix`` with log-probabilities


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS], entry_points=False)


def config(folder: Path, tp: int = 1, dp: int = 0, **more: Any) -> dict[str, Any]:
    """Return a configuration; ``dp`` of 0 stands for one rank, or plain tensor parallelism."""
    parallel = [{"use": "tensor", "size": tp}] if tp > 1 else []
    if dp:
        parallel.append({"use": "dp_attention", "size": dp})
    return {
        "model": str(write_config(folder, more.pop("name", "v3"))),
        "weights": {"use": "random"},
        "device": "cpu",
        "context_length": CONTEXT,
        "memory": {"kv_tokens": 512},
        "skip_tokenizer": True,
        "dtype": "float32",
        "attention": {"page_size": 4},
        "parallel": parallel,
        **more,
    }


def engine(folder: Path, plugins: PluginSet, tp: int, dp: int, **more: Any) -> RankSet:
    return RankSet(rank_plan(config(folder, tp, dp, **more), plugins), plugins)


def prompt(id: int, length: int) -> list[int]:
    return np.random.default_rng(id).integers(2, VOCAB, length).tolist()


def mix() -> list[Submit]:
    """Return requests with prompts from 1 to 70 tokens, outputs from 1 to 24, greedy and drawn,
    penalties, priorities.
    """
    lengths, outputs = (3, 70, 1, 12, 33, 5, 8, 2, 50, 17), (24, 2, 9, 1, 14, 20, 3, 11, 6, 16)
    found = []
    for id, (length, output) in enumerate(zip(lengths, outputs, strict=True), 1):
        extra = {"temperature": 0.9, "top_k": 20} if id % 3 == 0 else {}
        extra |= {"frequency_penalty": 0.4} if id % 4 == 0 else {}
        extra |= {"logprobs": 1, "prompt_logprobs": 2} if id == SCORED else {}
        asked = submit(id, prompt(id, length), output, **extra)
        asked.priority = id % 2
        found.append(asked)
    return found


def tokens(collected: dict[int, Any]) -> dict[int, tuple[list[int], str]]:
    return {id: (one.tokens, one.finished.reason) for id, one in collected.items()}


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, plugins: PluginSet
) -> dict[int, tuple[list[int], str]]:
    """The results of ``mix`` on one rank."""
    return tokens(run_ranks(config(tmp_path_factory.mktemp("alone")), mix(), plugins))


def arriving(ranks: RankSet, messages: Sequence[Inbound], a_turn: int) -> None:
    """Send ``a_turn`` messages every third turn, until all requests are done."""
    left = list(messages)
    for turn in range(4000):
        if turn % 3 == 0 and left:
            now, left = left[:a_turn], left[a_turn:]
            ranks.turn(now)
        elif left or not ranks.idle:
            ranks.turn()
        else:
            return
    raise AssertionError("not idle after 4000 turns")


# ---- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_tokens_are_those_of_one_rank(
    tmp_path: Path, plugins: PluginSet, alone: dict[int, Any], tp: int, dp: int, overlap: bool
) -> None:
    with engine(
        tmp_path, plugins, tp, dp, scheduler={"overlap": overlap, "chunk_size": 16}
    ) as ranks:
        arriving(ranks, mix(), 3)
        assert tokens(ranks.collected) == alone
        ranks.check_idle()
        assert (
            len(ranks.collected[SCORED].logprobs) == 14
            and len(ranks.collected[SCORED].prompt_logprobs) == 32
        )
        assert sum(ranks.stats[group].finished for group in range(dp)) == len(alone)
        assert all(ranks.stats[group].finished for group in range(dp)), "a group had nothing to do"


@pytest.mark.parametrize(
    ("tp", "dp", "policy"),
    some_slow_rows(
        [(*mesh, policy) for mesh in MESHES for policy in ("fcfs", "priority")],
        [(2, 2, "fcfs"), (4, 2, "priority"), (4, 4, "fcfs")],
    ),
)
def test_a_group_whose_pool_is_too_small_preempts_alone(
    tmp_path: Path, plugins: PluginSet, tp: int, dp: int, policy: str
) -> None:
    """Groups with an even number get three long answers each, the others short ones."""
    asked = [submit(id, prompt(id, 8), 6 if id % 2 else 44) for id in range(3 * dp)]
    for one in asked:
        one.priority = one.id % 3
    plain = tokens(run_ranks(config(tmp_path / "one"), asked, plugins))
    with engine(
        tmp_path, plugins, tp, dp, memory={"kv_tokens": CONTEXT + 4}, policy={"use": policy}
    ) as ranks:
        assert tokens(ranks.run(asked)) == plain
        ranks.check_idle()
        assert [ranks.stats[group].preemptions > 0 for group in range(dp)] == [True, False] * (
            dp // 2
        )


def test_process_groups_carry_it_too(
    tmp_path: Path, plugins: PluginSet, alone: dict[int, Any]
) -> None:
    """Equal tokens come over gloo instead of shared memory."""
    with engine(tmp_path, plugins, 2, 2, collectives={"use": "gloo"}) as ranks:
        arriving(ranks, mix(), 3)
        assert tokens(ranks.collected) == alone
        ranks.check_idle()


@pytest.mark.parametrize("name", ["v2", "llama", "v3_fp8"])
def test_other_models(tmp_path: Path, plugins: PluginSet, name: str) -> None:
    asked = mix()[:5]
    one = tokens(run_ranks(config(tmp_path / "one", name=name), asked, plugins))
    assert tokens(run_ranks(config(tmp_path / "more", 4, 2, name=name), asked, plugins)) == one


def test_a_group_without_work_steps_with_the_busy_one(
    tmp_path: Path, plugins: PluginSet, alone: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time always goes to group 0; the other group never has a batch of its
    own.
    """
    with engine(tmp_path, plugins, 2, 2) as ranks:
        modes = [watched(one, monkeypatch) for one in ranks.engines]
        for asked in mix()[:3]:
            ranks.run([asked])
        assert tokens(ranks.collected) == {id: alone[id] for id in (1, 2, 3)}
        assert ranks.stats[0].finished == 3 and ranks.stats[0].running == 0
        assert set(modes[1]) == {Mode.IDLE} and len(modes[1]) == len(modes[0])
        assert (
            ranks.stats[1].steps == ranks.stats[1].step_seconds == 0
            and ranks.stats[0].step_seconds > 0
        )


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Mode]:
    """Record the modes of the batches that the engine launches from now on."""
    modes: list[Mode] = []
    launch = engine.runner.launch
    monkeypatch.setattr(
        engine.runner, "launch", lambda batch: (modes.append(batch.mode), launch(batch))[1]
    )
    return modes


def test_warm_up_tries_a_step_in_which_only_one_group_has_work(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks run it together before the engine is ready, so the first request finds nothing
    untried.
    """
    modes: dict[int, list[Mode]] = {}
    launch = Runner.launch

    def watch(runner: Runner, batch: Batch) -> InFlight:
        modes.setdefault(id(runner), []).append(batch.mode)
        return launch(runner, batch)

    monkeypatch.setattr(Runner, "launch", watch)
    with engine(tmp_path, plugins, 4, 2) as ranks:
        tried = [modes[id(one.runner)] for one in ranks.engines]
        both = [Mode.PREFILL, Mode.PREFILL, Mode.DECODE]
        assert tried == [[*both, Mode.DECODE]] * 2 + [[*both, Mode.IDLE]] * 2
        assert ranks.idle


# ---- distribution --------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_requests_spread_over_groups_and_ranks_of_a_group_agree(
    tmp_path: Path, plugins: PluginSet, tp: int, dp: int
) -> None:
    with engine(tmp_path, plugins, tp, dp) as ranks:
        ranks.turn([submit(id, prompt(id, 4), 40) for id in range(2 * dp)])
        loads = [one.scheduler.load() for one in ranks.engines]
        assert [load.running + load.waiting for load in loads] == [2] * tp
        ranks.turn(
            [Abort([0])]
        )  # group 0 has one left, so the next two go there and then to the others
        ranks.turn([submit(100, prompt(100, 4), 4)])
        assert [one.scheduler.load().running for one in ranks.engines] == [2] * tp
        ranks.run()
        ranks.check_idle()
        assert ranks.collected[0].finished and ranks.collected[0].finished.reason == "abort"


def test_only_leaders_speak_and_only_rank_0_replies(tmp_path: Path, plugins: PluginSet) -> None:
    with engine(tmp_path, plugins, 4, 2) as ranks:
        assert [one.sends_outputs for one in ranks.engines] == [True, False, True, False]
        assert [one.leads for one in ranks.engines] == [True, False, False, False]
        said: list[list[Any]] = [[] for _ in range(4)]
        for turn in range(12):
            asked: list[Inbound] = (
                [submit(1, [5, 6], 4), submit(2, [7], 4), Control(9, "check")] if not turn else []
            )
            for rank, outputs in enumerate(ranks.turn(asked)):
                said[rank].extend(outputs)
        assert said[1] == said[3] == []
        assert [type(message) for message in said[0]].count(Reply) == 1
        assert not any(isinstance(message, Reply) for message in said[2])
        ids = [
            {id for message in said[rank] if isinstance(message, StepOutput) for id in message.ids}
            for rank in (0, 2)
        ]
        assert ids == [{1}, {2}]


def test_idle_groups_say_nothing_while_others_work(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glowplug.core.engine.engine.STATS_EVERY", 1e9)
    with engine(tmp_path, plugins, 2, 2) as ranks:
        ranks.turn()
        said = [ranks.turn([submit(1, [5], 12)] if not turn else []) for turn in range(14)]
        assert [made for _, made in said] == [[]] * 14
        (last,) = next(made for made, _ in said if any(output.finished for output in made))
        assert last.stats and last.stats.finished == 1, (
            "statistics come with the last token, not after it"
        )


# ---- ends, refusals, controls --------------------------------------------------------------------


def test_aborts_reach_the_group_of_the_sequence(
    tmp_path: Path, plugins: PluginSet, alone: dict[int, Any]
) -> None:
    gone = {2, 5, 6, 9}
    with engine(tmp_path, plugins, 4, 2, scheduler={"chunk_size": 16}) as ranks:
        ranks.turn(mix())
        for turn, id in enumerate(sorted(gone)):
            ranks.turn([Abort([id, 999])] if turn % 2 else [Abort([999, id]), Abort([id])])
        ranks.run()
        ranks.check_idle()
        for id, (made, reason) in tokens(ranks.collected).items():
            if id in gone:
                assert reason == "abort" and made == alone[id][0][: len(made)]
            else:
                assert (made, reason) == alone[id]
        assert sum(ranks.stats[group].aborted for group in (0, 1)) == len(gone)


def test_a_full_group_refuses_once_and_serves_the_rest(tmp_path: Path, plugins: PluginSet) -> None:
    scheduler = {"max_running_requests": 1, "max_queued_requests": 1}
    with engine(tmp_path, plugins, 4, 2, scheduler=scheduler) as ranks:
        # the front keeps the engine's limit of 4; a group takes as many as the engine may hold
        collected = ranks.run([submit(id, prompt(id, 4), 6) for id in range(9)])
        ends = {
            id: (one.finished.reason, one.finished.error_code)
            for id, one in collected.items()
            if one.finished
        }
        assert [ends[id] for id in range(8)] == [("length", None)] * 8
        assert ends[8] == ("error", "queue_full")
        ranks.check_idle()
        assert len(ranks.run([submit(20, [5], 3)])[20].tokens) == 3, "room again"


def test_requests_that_no_group_can_run_are_refused_once(
    tmp_path: Path, plugins: PluginSet
) -> None:
    with engine(tmp_path, plugins, 2, 2) as ranks:
        collected = ranks.run([submit(1, prompt(1, CONTEXT), 30), submit(2, [5], 3)])
        assert (
            collected[1].finished and collected[1].finished.error_code == "context_length_exceeded"
        )
        assert len(collected[2].tokens) == 3


def test_deadlines_pass_in_every_group(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("glowplug.core.engine.engine.time.monotonic", lambda: now[0])
    with engine(tmp_path, plugins, 4, 2) as ranks:
        asked = [submit(id, [5 + id], 60) for id in range(4)]
        for one in asked[:3]:
            one.timeout = 5.0
        ranks.turn(asked)
        ranks.turn()
        now[0] += 6.0
        collected = ranks.run()
        assert [collected[id].finished.reason for id in range(4)] == ["timeout"] * 3 + ["length"]  # type: ignore[union-attr]
        ranks.check_idle()


def test_the_cache_is_dropped_by_all_groups_or_none(tmp_path: Path, plugins: PluginSet) -> None:
    with engine(tmp_path, plugins, 2, 2) as ranks:
        ranks.run([submit(1, prompt(1, 40), 4), submit(2, prompt(2, 40), 4)])
        cached = [one.scheduler.load().pages_evictable for one in ranks.engines]
        assert all(cached)
        ranks.turn([submit(3, [5], 30)])  # group 0 is busy, group 1 is not
        ranks.turn([Control(50, "flush")])
        assert not ranks.replies[50].ok and "running" in ranks.replies[50].error
        assert [one.scheduler.load().pages_evictable for one in ranks.engines] == cached
        ranks.run()
        ranks.control("flush")
        assert [one.scheduler.load().pages_evictable for one in ranks.engines] == [0, 0]


def test_controls_speak_for_all_ranks(tmp_path: Path, plugins: PluginSet) -> None:
    with engine(tmp_path, plugins, 4, 2) as ranks:
        ranks.run([submit(1, prompt(1, 40), 4)])
        pages = ranks.control("check").data
        assert [one["cached"] > 0 for one in pages["ranks"]] == [True, True, False, False]
        assert all(one["free"] + one["cached"] == one["total"] for one in pages["ranks"])
        info = ranks.control("info").data
        assert len(info["ranks"]) == 4 and all(
            one["kv_bytes"] == info["kv_bytes"] for one in info["ranks"]
        )
        ranks.turn([Control(70, "no such thing")])
        assert not ranks.replies[70].ok and "no such thing" in ranks.replies[70].error


def test_a_refusal_on_any_rank_is_the_answer(tmp_path: Path, plugins: PluginSet) -> None:
    """An example is a label that only one rank finds taken."""
    from glowplug.core.errors import RequestError

    def refuse(args: dict[str, Any]) -> dict[str, Any]:
        raise RequestError("not here")

    with engine(tmp_path, plugins, 2, 0) as ranks:
        ranks.engines[1].controls.add("info", refuse)
        ranks.turn([Control(60, "info")])
        assert not ranks.replies[60].ok and ranks.replies[60].error == "not here"


def test_every_rank_ends_when_the_front_has_gone(tmp_path: Path, plugins: PluginSet) -> None:
    with engine(tmp_path, plugins, 4, 2) as ranks:
        ranks.turn([submit(1, [5], 60)])
        assert ranks._each(lambda rank: ranks.engines[rank].turn(stop=rank == 0)) == [None] * 4


# ---- reports to the front ------------------------------------------------------------------------


def test_processes_report_group_by_group(tmp_path: Path, alone: dict[int, Any]) -> None:
    """Each leader's frames reach the front directly, statistics with the last token of a group."""
    asked = mix()[:4]
    executor = {"use": "multiprocess", "threads": 1, "oversubscribe": True}
    with LLM(**config(tmp_path, 2, 2, executor=executor)) as llm:
        done = llm.generate([one.prompt_ids for one in asked], [one.params for one in asked])
        assert [one.token_ids for one in done] == [alone[one.id][0] for one in asked]
        assert (
            llm.stats.finished == 4 and llm.stats.running == 0 and llm.stats.pages_total == 2 * 128
        )
        pages = llm.control("check")["ranks"]
        assert len(pages) == 2 and all(one["running"] == 0 < one["cached"] for one in pages)
        llm.control("flush")
        assert [one["cached"] for one in llm.control("check")["ranks"]] == [0, 0]


def test_statistics_add_up_over_groups() -> None:
    from glowplug.entrypoints.front.front import Front
    from tests.e2e.fake_engine import make_plan

    front = Front(make_plan(), None, ())
    front.receive(
        [StepOutput(stats=Stats(running=2, pages_total=10, page_size=4, step_seconds=0.5))]
    )
    assert front.stats.running == 2
    front.receive(
        [
            StepOutput(
                stats=Stats(running=3, pages_total=10, page_size=4, step_seconds=0.25, group=1)
            )
        ]
    )
    front.receive(
        [StepOutput(stats=Stats(running=1, pages_total=10, page_size=4, step_seconds=1.0))]
    )
    whole = front.stats
    assert (whole.running, whole.pages_total, whole.page_size, whole.step_seconds) == (
        4,
        20,
        4,
        1.25,
    )


@pytest.fixture
def scraped() -> Iterator[Any]:
    from glowplug.core.config.operation_options import MetricsOptions
    from glowplug.entrypoints.server.metrics import Metrics

    groups = [Stats(running=2), Stats(running=5, group=1)]
    yield lambda count: Metrics("m", Stats, MetricsOptions(), lambda: groups[:count]).text()


def test_groups_have_gauges_of_their_own_when_there_are_several(scraped: Any) -> None:
    assert 'group="' not in scraped(1)
    assert 'glowplug:group_num_requests_running{model_name="m",group="0"} 2' in scraped(2)
    assert 'glowplug:group_num_requests_running{model_name="m",group="1"} 5' in scraped(2)
