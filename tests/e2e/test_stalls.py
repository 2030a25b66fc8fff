"""Components that break their contract silently: the requests they hold end with an error that
names them, and the engine serves the rest. Legitimate waiting has no consequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.messages import Submit
from glowplug.core.testing.harness.drive import Collected
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, run_ranks, submit
from tests.e2e.stall_runtime import BARREN, HELD
from tests.support.tiny import VOCAB, write_config

PLUGIN = "tests.e2e.stall_plugin"
CONTEXT = 96
QUICK = 0.1  #: seconds in place of ``STALL_SECONDS``


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS, PLUGIN], entry_points=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glowplug.core.engine.stalls.STALL_SECONDS", QUICK)


def config(folder: Path, tp: int = 1, dp: int = 0, **more: Any) -> dict[str, Any]:
    parallel: list[dict[str, Any]] = [{"use": "tensor", "size": tp}] if tp > 1 else []
    if dp:
        parallel.append({"use": "dp_attention", "size": dp})
    layers = {"num_nextn_predict_layers": 1} if "nextn" in str(more.get("speculative")) else {}
    return {
        "model": str(write_config(folder, "v3", **layers)),
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


def engine(folder: Path, plugins: PluginSet, tp: int = 1, dp: int = 0, **more: Any) -> RankSet:
    return RankSet(rank_plan(config(folder, tp, dp, **more), plugins), plugins)


def asked(id: int, output: int = 6, priority: int = 0, length: int = 5, **times: float) -> Submit:
    made = submit(id, np.random.default_rng(id).integers(2, VOCAB, length).tolist(), output)
    made.priority = priority
    made.timeout, made.queue_timeout = times.get("timeout", 0.0), times.get("queue_timeout", 0.0)
    return made


def stalled(one: Collected, *names: str) -> bool:
    """Check that the sequence ended with the error of a stall, whose text has all of ``names``."""
    end = one.finished
    assert (
        end is not None
        and end.error is not None
        and (end.reason, end.error_code) == ("error", "stalled")
    ), end
    assert all(name in end.error for name in names), end.error
    return True


def ended_well(ranks: RankSet, *ids: int) -> None:
    for id in ids:
        end = ranks.collected[id].finished
        assert end is not None and end.reason == "length", (id, end)


# ---- policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_a_policy_that_orders_nothing_ends_the_requests_by_name(
    tmp_path: Path, plugins: PluginSet, quick: None, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(
        tmp_path, plugins, policy={"use": "stubborn"}, scheduler={"overlap": overlap}
    ) as ranks:
        collected = ranks.run([asked(1), asked(2)])
        assert all(
            stalled(collected[id], "policy 'stubborn'", PLUGIN, "2 of 2 waiting") for id in (1, 2)
        )
        logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert (
            len(logged) == 1
            and "2 requests ended" in logged[0]
            and "policy 'stubborn'" in logged[0]
        )
        stalled(ranks.run([asked(3)])[3], "1 of 1 waiting")
        ranks.check_idle()


@pytest.mark.parametrize("fault", ["withholds", "copies", "numbers"])
def test_requests_that_the_policy_leaves_out_end_and_the_rest_is_served(
    tmp_path: Path, plugins: PluginSet, quick: None, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path, plugins, policy={"use": "stubborn", "fault": fault}) as ranks:
        collected = ranks.run([asked(1), asked(2, priority=HELD), asked(3)])
        ended_well(ranks, 1, 3)
        stalled(collected[2], "policy 'stubborn'", "1 of 1 waiting")
        ranks.run([asked(4)])
        ended_well(ranks, 4)
        ranks.check_idle()
        passed_over = [
            record.getMessage() for record in caplog.records if "skipped" in record.getMessage()
        ]
        assert len(passed_over) == (fault != "withholds"), "one line, however often it happens"


def test_a_request_that_a_policy_returns_twice_is_admitted_once(
    tmp_path: Path, plugins: PluginSet
) -> None:
    with engine(tmp_path, plugins, policy={"use": "stubborn", "fault": "twice"}) as ranks:
        ranks.run([asked(1), asked(2)])
        ended_well(ranks, 1, 2)
        ranks.check_idle()


def test_a_victim_that_does_not_run_is_replaced_by_the_newest(
    tmp_path: Path, plugins: PluginSet, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(
        tmp_path,
        plugins,
        policy={"use": "stubborn", "fault": "absent_victim"},
        memory={"kv_tokens": CONTEXT + 4},
    ) as ranks:
        ranks.run([asked(id, output=60) for id in (1, 2, 3)])
        ended_well(ranks, 1, 2, 3)
        assert ranks.stats[0].preemptions > 0
        assert (
            sum("victim that is not running" in record.getMessage() for record in caplog.records)
            == 1
        )
        ranks.check_idle()


@pytest.mark.parametrize(("tp", "dp"), [(2, 0), (2, 2), (4, 2)])
def test_ranks_and_groups_end_the_same_requests(
    tmp_path: Path,
    plugins: PluginSet,
    quick: None,
    tp: int,
    dp: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A group that only holds requests joins the steps of the working group, and ends its own
    requests.
    """
    with engine(
        tmp_path, plugins, tp, dp, policy={"use": "stubborn", "fault": "withholds"}
    ) as ranks:
        messages = [asked(id, output=60, priority=HELD if id % 2 else 0) for id in range(4)]
        collected = ranks.run(messages)
        assert all(stalled(collected[id], "policy 'stubborn'") for id in (1, 3))
        ended_well(ranks, 0, 2)
        ranks.check_idle()
        assert len(caplog.records) == 1, "one of the ranks that hold a request reports it"


def test_a_user_of_the_offline_engine_reads_the_reason(tmp_path: Path) -> None:
    """The bounds are the real ones."""
    with LLM(**config(tmp_path, policy={"use": "stubborn"}), plugins=[PLUGIN]) as llm:
        done = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0]
    assert (
        done.finish_reason == "error"
        and done.error is not None
        and "policy 'stubborn'" in done.error
    )


# ---- schedulers ----------------------------------------------------------------------------------


def test_a_scheduler_that_launches_nothing_is_named(
    tmp_path: Path, plugins: PluginSet, quick: None
) -> None:
    with engine(tmp_path, plugins, scheduler={"use": "sleepy"}) as ranks:
        stalled(
            ranks.run([asked(1)])[1],
            "scheduler 'sleepy'",
            PLUGIN,
            "policy 'fcfs' (built in)",
            "pages",
        )
        ranks.check_idle()


def test_a_scheduler_may_wait_a_moment(tmp_path: Path, plugins: PluginSet) -> None:
    """Some schedulers wait for more requests; the bounds are the real ones."""
    with engine(tmp_path, plugins, scheduler={"use": "sleepy", "seconds": 0.3}) as ranks:
        ranks.run([asked(1)], most=200_000)
        ended_well(ranks, 1)


def test_a_deadline_that_passes_first_is_the_reported_reason(
    tmp_path: Path, plugins: PluginSet
) -> None:
    with engine(tmp_path, plugins, policy={"use": "stubborn"}) as ranks:
        collected = ranks.run([asked(1, queue_timeout=0.2), asked(2, timeout=0.2)], most=200_000)
        assert [collected[id].finished.reason for id in (1, 2)] == ["timeout", "timeout"]  # type: ignore[union-attr]


def test_waiting_for_room_is_no_stall(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one row, a pool for one and two groups, with bounds at which any turn without a step
    would count.
    """
    monkeypatch.setattr("glowplug.core.engine.stalls.STALL_SECONDS", 0.0)
    monkeypatch.setattr("glowplug.core.engine.stalls.STALL_TURNS", 1)
    for tp, dp, more in (
        (1, 0, {"scheduler": {"max_running_requests": 1}}),
        (2, 2, {}),
        (1, 0, {"scheduler": {"overlap": False, "mixed": False}}),
    ):
        with engine(tmp_path, plugins, tp, dp, memory={"kv_tokens": CONTEXT + 4}, **more) as ranks:
            ranks.run([asked(id, output=50) for id in range(6)])
            ended_well(ranks, *range(6))
            ranks.check_idle()


# ---- algorithms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    ("algorithm", "tp", "dp"), [("barren", 1, 0), ("barren_nextn", 1, 0), ("barren", 2, 2)]
)
def test_rows_that_gain_no_token_end_by_name(
    tmp_path: Path,
    plugins: PluginSet,
    algorithm: str,
    tp: int,
    dp: int,
    after: int,
    overlap: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine(
        tmp_path,
        plugins,
        tp,
        dp,
        speculative={"use": algorithm, "after": after},
        scheduler={"overlap": overlap},
    ) as ranks:
        collected = ranks.run([asked(1, output=20), asked(2, output=BARREN), asked(3, output=20)])
        stalled(collected[2], f"speculative '{algorithm}'", PLUGIN)
        assert len(collected[2].tokens) >= after
        ended_well(ranks, 1, 3)
        assert sum("1 request ended" in record.getMessage() for record in caplog.records) == 1
        ranks.run([asked(4, output=3)])
        ended_well(ranks, 4)
        ranks.check_idle()


def test_rows_near_the_context_s_end_gain_nothing_and_do_no_harm(
    tmp_path: Path, plugins: PluginSet
) -> None:
    """Their positions stay within the row's pages and the page table while the steps are
    counted.
    """
    with engine(tmp_path, plugins, speculative={"use": "barren", "after": 0}) as ranks:
        collected = ranks.run(
            [asked(1, output=BARREN, length=CONTEXT - BARREN), asked(2, output=30)]
        )
        stalled(collected[1], "speculative 'barren'")
        ended_well(ranks, 2)
        ranks.check_idle()
    alone = run_ranks(config(tmp_path / "alone"), [asked(2, output=30)], plugins)
    assert collected[2].tokens == alone[2].tokens
