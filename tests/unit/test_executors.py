"""Executors without processes: the first cause of a failure, the place of a process among hosts,
and the agreement of hosts.
"""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import EngineDead, PlanRefused
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.step.messages import Failed, Progress, RunningCall
from glowplug.entrypoints.cli.flags.command_line import serve_defaults
from glowplug.plugins.executors.ranks.failure_cause import (
    QUIET,
    SPAWN,
    FailureKind,
    Watch,
    first_cause,
    host_limit,
)
from glowplug.plugins.executors.ranks.host import Site, find_site
from glowplug.plugins.executors.ranks.host_identity import differences, identity
from glowplug.plugins.executors.ranks.reach import await_first_host
from glowplug.plugins.executors.ranks.start_watch import StartWatch, shown
from glowplug.plugins.executors.torchrun import TorchrunOptions
from tests.support.tiny import write_config

PLUGINS = load_plugins(entry_points=False)
ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(limit: float = 10.0) -> tuple[Watch, Clock]:
    clock = Clock()
    watch = Watch(range(3), limit, clock)
    for rank in range(3):
        watch.received(rank, [Progress(rank, "serve")])
    return watch, clock


def lost_peer(rank: int) -> list[Any]:
    return [Failed(rank, "serve", "CollectiveError: a peer has gone", consequence=True)]


def test_a_rank_that_ended_explains_those_that_lost_it() -> None:
    watch, _ = watched()
    watch.received(0, lost_peer(0))
    watch.received(2, lost_peer(2))
    watch.ended(1, "exit code -9")
    assert first_cause(watch.troubles).text == "rank 1 ended (exit code -9) in phase serve"


def test_a_failure_of_its_own_comes_before_silence_and_consequences() -> None:
    watch, clock = watched()
    watch.received(0, lost_peer(0))
    clock.now = 20.0
    watch.received(2, [Failed(2, "serve", "ValueError: no")])
    watch.look()
    assert first_cause(watch.troubles).text == "rank 2 failed in phase serve: ValueError: no"
    assert [trouble.kind for trouble in watch.troubles] == [
        FailureKind.CONSEQUENCE,
        FailureKind.FAILED,
        FailureKind.SILENT,
    ]


def test_a_silent_rank_explains_loops_that_stand_still() -> None:
    """The other ranks report theirs a moment before the stopped rank counts as silent."""
    watch, clock = watched()
    clock.now += 3.0
    for rank in (0, 2):
        stuck = Failed(rank, "serve", "its loop has stood still for 10 s, in wait", stuck=True)
        watch.received(rank, [stuck])
    assert first_cause(watch.troubles).kind == FailureKind.STUCK
    watch.received(1, [Progress(1, "serve")])
    clock.now += 3.0
    watch.look(QUIET)
    assert "rank 1 has been silent for 3 s" in str(first_cause(watch.troubles))


def test_a_loop_that_stands_still_explains_those_that_wait_for_it() -> None:
    watch, _ = watched()
    for rank in (0, 1):
        said = Failed(rank, "serve", "its loop has stood still", consequence=rank == 0, stuck=True)
        watch.received(rank, [said])
    assert str(first_cause(watch.troubles)).startswith("rank 1 failed in phase serve: its loop")


def test_one_silent_rank_is_found_among_others_that_beat() -> None:
    watch, clock = watched()
    for now in range(1, 12):
        clock.now = float(now)
        watch.received(0, [Progress(0, "serve")])
        watch.received(2, [Progress(2, "serve")])
        watch.look()
    assert [trouble.text for trouble in watch.troubles] == [
        "rank 1 has been silent for 11 s (phase serve)"
    ]


def test_the_first_rank_that_lost_a_peer_is_named_when_no_cause_is_known() -> None:
    watch, _ = watched()
    watch.received(2, lost_peer(2))
    watch.received(0, lost_peer(0))
    watch.ended(2, "exit code 1")  # its message came before
    assert first_cause(watch.troubles).text.startswith("rank 2 failed")


def test_an_orderly_end_and_a_slow_spawn_are_no_failures() -> None:
    watch, clock = watched(limit=1.0)
    for rank in range(3):
        watch.received(rank, [Progress(rank, "ended", 1, 1)])
        watch.ended(rank, "exit code 0")
    assert watch.all_ended() and not watch.troubles
    slow = Watch([0], 1.0, clock)
    clock.now += SPAWN - 1
    slow.look()
    assert not slow.troubles
    clock.now += 2
    slow.look()
    assert "rank 0 has been silent for 31 s (phase spawn)" in str(slow.troubles[0])


def test_progress_counts_for_the_whole_engine() -> None:
    """The limit starts anew whenever any rank moves; then the rank that is furthest behind is
    named.
    """
    clock = Clock()
    start = StartWatch(60.0, None, clock)
    for at, progress in (
        (0.0, {0: "spawn", 1: "spawn"}),
        (50.0, {0: "weights 7%", 1: "weights 100%"}),
        (100.0, {0: "weights 8%", 1: "weights 100%"}),
        (155.0, {0: "weights 9%", 1: "weights 100%"}),
        (214.0, {0: "weights 9%", 1: "weights 100%"}),
    ):
        clock.now = at
        assert start.look(progress) is None
    clock.now = 216.0
    reason = start.look({0: "weights 9%", 1: "weights 100%"})
    assert reason is not None
    assert reason == (
        "no rank has made progress for 60 s; rank 0 is in phase weights 9%\n"
        "    fix: wait longer (collectives.timeout, --dist-timeout)"
    )
    assert start.look({0: "ready", 1: "serve"}) is None


def test_a_start_may_have_a_limit_of_its_own() -> None:
    clock = Clock()
    start = StartWatch(60.0, 5.0, clock)
    assert start.meeting_limit == 5.0 and StartWatch(60.0, None, clock).meeting_limit == 60.0
    clock.now = 6.0
    reason = start.look({0: "ready", 1: "capture 50%", 2: "kv", 3: "capture 4%"})
    assert reason is not None
    assert reason.startswith("rank 2 was not ready after 5 s (phase kv)\n")
    call = RunningCall("cache 'x' (y 1)", "reserve", "correct or update y 1")
    assert start.look({0: "kv"}, {0: call}) == (
        "rank 0 was not ready after 5 s (phase kv, in reserve of cache 'x' (y 1))\n"
        "    fix: correct or update y 1, or wait longer (executor.start_timeout)"
    )


def test_a_rank_that_waits_in_collectives_is_not_named_before_one_of_the_same_phase() -> None:
    clock = Clock()
    start = StartWatch(60.0, 5.0, clock)
    clock.now = 6.0
    calls = {
        0: RunningCall("collectives 'gloo' (built in)", "broadcast", "report it", waits=True),
        1: RunningCall("sampling 'slow' (y 1)", "sample", "correct or update y 1"),
    }
    reason = start.look({0: "self-test", 1: "self-test"}, calls)
    assert reason is not None and reason.startswith("rank 1 was not ready")
    reason = start.look({0: "kv", 1: "self-test"}, calls)
    assert reason is not None and reason.startswith("rank 0 was not ready")


def test_a_short_limit_leaves_time_to_import() -> None:
    clock = Clock()
    start = StartWatch(2.0, None, clock)
    assert start.look({0: "build"}) is None
    clock.now = SPAWN - 1
    assert start.look({0: "build"}) is None
    clock.now = SPAWN + 1
    assert "rank 0 is in phase build" in str(start.look({0: "build"}))


def test_reports_give_the_share_of_a_phase() -> None:
    watch = Watch(range(3), 10.0, Clock())
    watch.received(0, [Progress(0, "weights", 0, 1), Progress(0, "weights", 41, 900)])
    watch.received(0, [Progress(0, "weights")])  # a heartbeat
    watch.received(1, [Progress(1, "weights", 30, 30), Progress(1, "kv", 0, 1)])
    assert watch.progress == {0: "weights 4%", 1: "kv", 2: "spawn"}
    assert {rank: phase for rank, (phase, _) in watch.states.items()} == watch.progress
    assert shown({**watch.progress, 3: "spawn"}) == (
        "rank 0 weights 4%, rank 1 kv, ranks 2 to 3 spawn"
    )


@pytest.mark.parametrize("timeout", [2.0, 10.0, 600.0])
def test_hosts_are_given_up_before_the_collectives_are(timeout: float) -> None:
    assert timeout / 2 <= host_limit(timeout) < timeout


# ---- sites ---------------------------------------------------------------------------------------


def planned(folder: Path, **config: Any) -> EnginePlan:
    executor = {"use": "torchrun", "hosts": 2, "address": "10.0.0.1:29500", "oversubscribe": True}
    given = {"executor": executor, "parallel": [{"use": "tensor", "size": 4}], **config}
    return make_plan(
        {
            "model": str(write_config(folder, "v3")),
            "weights": {"use": "random"},
            "context_length": 96,
            "memory": {"kv_tokens": 512},
            "skip_tokenizer": True,
            "device": "cpu",
            **given,
        },
        plugins=PLUGINS,
    )


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", "Connection refused"),
        ("no-such-host.invalid", "(Name or service|Temporary failure|No address)"),
    ],
)
def test_a_first_host_that_is_not_there_is_named_with_the_reason(host: str, reason: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens
        site = Site(1, 2, 1, 1, host, taken.getsockname()[1], serves=False)
        with pytest.raises(
            EngineDead,
            match=rf"host 1 \(rank 1\) could not reach host 0 \(rank 0\) at {host}:\d+ within "
            rf"1 s: .*{reason}",
        ):
            await_first_host(site, 1.0)


def test_a_first_host_that_starts_later_is_waited_for() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        site = Site(1, 2, 1, 1, "127.0.0.1", listener.getsockname()[1], serves=False)
        threading.Timer(0.3, listener.listen).start()
        await_first_host(site, 60.0)


def test_a_site_is_a_host_by_the_flags_and_a_rank_under_torchrun(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    options = TorchrunOptions(hosts=2, host_rank=1, address="10.0.0.1:29500")
    site = find_site(options, plan, {})
    assert list(site.ranks) == [2, 3] and not site.serves and site.name(1) == "host 1 (ranks 2, 3)"
    assert site.rendezvous == "tcp://10.0.0.1:29500/0?held"
    launched = find_site(TorchrunOptions(), plan, ENVIRONMENT)
    assert (
        list(launched.ranks) == [2]
        and launched.count == 4
        and launched.name(2) == "host 1 (rank 2)"
    )
    assert not launched.serves
    own = find_site(
        TorchrunOptions(),
        plan,
        {**ENVIRONMENT, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"},
    )
    assert own.serves and own.index == 0


def test_a_world_of_another_size_and_hosts_without_an_address_are_refused(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    with pytest.raises(PlanRefused, match="torchrun started 8 processes, the plan has 4 ranks"):
        find_site(TorchrunOptions(), plan, {**ENVIRONMENT, "WORLD_SIZE": "8"})
    with pytest.raises(PlanRefused, match="dist-init-addr"):
        find_site(TorchrunOptions(hosts=2), plan, {})


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("host_rank", 2, "there is no host 2: the plan has 2"),
        ("address", "10.0.0.1", "is not HOST:PORT"),
        ("address", "10.0.0.1:99999", "is not HOST:PORT"),
    ],
)
def test_the_plan_refuses_impossible_places(
    tmp_path: Path, option: str, value: Any, says: str
) -> None:
    executor = {
        "use": "torchrun",
        "hosts": 2,
        "address": "a:1",
        "oversubscribe": True,
        option: value,
    }
    with pytest.raises(PlanRefused, match=says):
        planned(tmp_path, executor=executor)


@pytest.mark.parametrize(
    ("config", "environment", "executor"),
    [
        ({}, {}, "multiprocess"),
        ({"executor": {"hosts": 1}}, {}, "multiprocess"),
        ({"executor": {"hosts": 2}}, {}, "torchrun"),
        ({"executor": {"address": "a:1"}}, {}, "torchrun"),
        ({}, {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "2"}, "torchrun"),
    ],
)
def test_several_hosts_choose_the_executor(
    config: dict[str, Any], environment: dict[str, str], executor: str
) -> None:
    assert serve_defaults(config, None, environment)["executor.use"] == executor


def test_a_sheet_of_several_hosts_chooses_it_too() -> None:
    assert serve_defaults({}, HardwareFacts(hosts=2), {})["executor.use"] == "torchrun"


# ---- agreement -----------------------------------------------------------------------------------


def test_hosts_with_the_same_command_agree(tmp_path: Path) -> None:
    """Each host receives its own number and may keep the model in another folder."""
    executor = {
        "use": "torchrun",
        "hosts": 2,
        "address": "10.0.0.1:29500",
        "oversubscribe": True,
        "threads": 2,
    }
    first, second = (
        planned(tmp_path / "a"),
        planned(tmp_path / "b", executor={**executor, "host_rank": 1}),
    )
    assert differences([identity(first), identity(second)], ["host 0", "host 1"]) == []


@pytest.mark.parametrize(
    ("config", "field", "says"),
    [
        ({"seed": 9}, "plan", '{"seed":0}, host 1 has {"seed":9}'),
        ({"memory": {"kv_tokens": 1024}}, "memory.kv_tokens", '"num_pages":33'),
        ({"cache": {"use": "none"}}, "plan", '"cache none"'),
        ({"parallel": [{"use": "tensor", "size": 2}]}, "parallel", '"tp":2'),
    ],
)
def test_another_plan_is_named_with_the_values_of_both(
    tmp_path: Path, config: dict[str, Any], field: str, says: str
) -> None:
    names = ["host 0", "host 1"]
    found = differences([identity(planned(tmp_path)), identity(planned(tmp_path, **config))], names)
    assert any(
        refusal.field == field and says in refusal.reason and refusal.fix for refusal in found
    ), found


def test_hosts_with_other_loads_of_experts_are_refused_in_few_words(tmp_path: Path) -> None:
    """The file's place may differ, its content may not; a message does not contain all of it."""

    def with_load(name: str, first: int) -> EnginePlan:
        path = tmp_path / name
        layers = {f"model.layers.{n}.mlp": [first, 2, 3, 4, 5, 6, 7, 8 * 10**9] for n in (1, 2, 3)}
        load = {"model": "m", "architecture": "DeepseekV3ForCausalLM", "layers": layers}
        path.write_text(json.dumps(load))
        experts = {"use": "ep_moe", "size": 4, "placement": str(path)}
        return planned(tmp_path / "v3", parallel=[{"use": "tensor", "size": 4}, experts])

    first, same, other = (with_load(*one) for one in (("a", 1), ("b", 1), ("c", 9)))
    names = ["host 0", "host 1"]
    assert differences([identity(first), identity(same)], names) == []
    (found,) = differences([identity(first), identity(other)], names)
    assert found.field == "plan" and "placement" in found.reason and len(found.reason) < 600


def test_other_plugins_versions_and_checkpoints_are_named(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    other = replace(plan, plugin_fingerprint="0" * 16, plugins=(*plan.plugins, "third_party"))
    (plugins,) = differences([identity(plan), identity(other)], ["host 0", "host 1"])
    assert plugins.field == "plugins" and "third_party" in plugins.reason
    ours = identity(plan)
    (version,) = differences(
        [ours, ours.replace(b'"python":"3.', b'"python":"2.')], ["host 0", "host 1"]
    )
    assert "different python" in version.reason and "host 1 has 2." in version.reason
    config = {**plan.facts.model.config, "rope_theta": 5.0}
    facts = replace(plan.facts, model=replace(plan.facts.model, config=config))
    (checkpoint,) = differences([ours, identity(replace(plan, facts=facts))], ["host 0", "host 1"])
    assert checkpoint.field == "model"
