"""Ranks in the plan: mesh, machine, hosts, order and sizes of strategies, and the printed
layout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.layout_table import blocks, runs
from glowplug.core.plan.plan import BudgetLine, EnginePlan
from glowplug.core.plan.table import render
from glowplug.core.plugin.registry import PluginSet
from tests.plan.test_cli import ENVIRONMENT, glowplug
from tests.support.pace import slowness, yardstick
from tests.support.source_tree import ROOT

SHAPES = ROOT / "models" / "shapes"
V3 = str(SHAPES / "deepseek-v3.json")
Refusals = Callable[..., list[Refusal]]


def strategies(*sizes: tuple[str, int], **more: Any) -> dict[str, Any]:
    return {"parallel": [{"use": use, "size": size} for use, size in sizes], **more}


@pytest.fixture(scope="session")
def many(cpu: HardwareFacts) -> HardwareFacts:
    return replace(cpu, cpu_cores=64)


@pytest.fixture(scope="session")
def refusals(planned: Any) -> Refusals:
    """A function that returns every refusal in order; each is complete and no two are the same."""

    def run(config: dict[str, Any], **more: Any) -> list[Refusal]:
        with pytest.raises(PlanRefused) as caught:
            planned(config, **more)
        found = list(caught.value.refusals)
        assert all(r.by and r.field and r.reason and r.fix and r.origin for r in found)
        assert len({(r.field, r.reason) for r in found}) == len(found)
        return found

    return run


# ---- the list of strategies ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "field", "reason", "fix"),
    [
        (
            strategies(("ep_moe", 4)),
            "parallel.0.use",
            "none is listed before it",
            '"tensor", size = 4 before it',
        ),
        (
            strategies(("dp_attention", 2)),
            "parallel.0.use",
            "no strategy listed before it",
            '"tensor", size = 2 before it',
        ),
        (
            strategies(("tensor", 2), ("tensor", 4)),
            "parallel.1.use",
            "both define the mesh axis tp",
            "keep one",
        ),
        (
            strategies(("tensor", 4), ("ep_moe", 2), ("ep_moe", 4)),
            "parallel.2.use",
            "both define the mesh axis ep",
            "keep one",
        ),
        (
            strategies(("single", 1), ("tensor", 2)),
            "parallel.0.use",
            "single means one rank",
            "leave it out",
        ),
        (
            strategies(("dp_attention", 2), ("tensor", 4), ("ep_moe", 2)),
            "parallel.1.use",
            "each subdivides the ranks of those before it",
            "in the order tensor, ep_moe, dp_attention",
        ),
        (
            strategies(("tensor", 4), ("dp_attention", 2), ("ep_moe", 2)),
            "parallel.2.use",
            "each subdivides the ranks of those before it",
            "in the order tensor, ep_moe, dp_attention",
        ),
        (
            strategies(("tensor", 3)),
            "parallel.0.size",
            "num_attention_heads of 4 does not split over 3",
            "size = 2",
        ),
        (
            strategies(("tensor", 4), ("ep_moe", 3)),
            "parallel.1.size",
            "8 experts cannot be divided evenly among 3 ranks",
            "parallel.1.size = 1 or 2 or 4",
        ),
        (
            strategies(("tensor", 2), ("ep_moe", 4)),
            "parallel.1.size",
            "4 does not divide the 2",
            "1 or 2",
        ),
        (
            strategies(("tensor", 4), ("dp_attention", 3)),
            "parallel.1.size",
            "4 tensor ranks cannot be divided evenly among 3 groups",
            "size = 4",
        ),
        (
            strategies(("tensor", 1), ("dp_attention", 2)),
            "parallel.1.size",
            "there is only one rank",
            "more tensor ranks",
        ),
    ],
)
def test_an_impossible_list_of_strategies_is_refused(
    refusals: Refusals,
    many: HardwareFacts,
    config: dict[str, Any],
    field: str,
    reason: str,
    fix: str,
) -> None:
    found = {r.field: r for r in refusals(config, hardware=many) if reason in r.reason}
    assert list(found) == [field]
    assert fix in found[field].fix


def test_an_order_is_one_refusal(refusals: Refusals, many: HardwareFacts) -> None:
    """Reasons of strategies for ranks that do not exist yet are left out."""
    config = strategies(("dp_attention", 2), ("ep_moe", 2), ("tensor", 4))
    assert [r.field for r in refusals(config, hardware=many)] == ["parallel.1.use"]


def test_whole_experts_for_all_to_all(
    refusals: Refusals, planned: Any, many: HardwareFacts
) -> None:
    def config(size: int, exchange: str) -> dict[str, Any]:
        return {
            "parallel": [
                {"use": "tensor", "size": 4},
                {"use": "ep_moe", "size": size, "exchange": exchange},
            ]
        }

    found = refusals(config(2, "all_to_all"), hardware=many)
    assert [r.field for r in found] == [
        "parallel.1.exchange"
    ] and 'exchange = "all_gather"' in found[0].fix
    assert planned(config(4, "all_to_all_static"), hardware=many).ranks == 4
    assert planned(config(2, "all_gather"), hardware=many).mesh == {"tp": 4, "ep": 2}


def test_all_refusals_are_reported_at_once(
    refusals: Refusals, llama: Path, cpu: HardwareFacts
) -> None:
    """The causes: experts of a model without any, groups that do not divide, more ranks than cores,
    a draft without a layer.
    """
    config = strategies(
        ("tensor", 16),
        ("ep_moe", 2),
        ("dp_attention", 3),
        model=str(llama),
        speculative={"use": "nextn", "steps": 2, "draft_tokens": 4, "topk": 1},
    )
    found = {(r.field, r.by) for r in refusals(config, hardware=cpu)}
    assert found >= {
        ("parallel.0.size", "tensor"),
        ("parallel.1.use", "ep_moe"),
        ("parallel.2.size", "dp_attention"),
        ("speculative.use", "nextn"),
        ("speculative.draft_tokens", "nextn"),
    }


# ---- the machine ---------------------------------------------------------------------------------


def test_more_ranks_than_cores(refusals: Refusals, planned: Any, cpu: HardwareFacts) -> None:
    two = replace(cpu, cpu_cores=2, name="a laptop")
    found = refusals(strategies(("tensor", 4)), hardware=two)
    assert [r.reason for r in found] == ["4 ranks are more than the 2 cores of a laptop"]
    assert found[0].field == "parallel.0.size"
    assert "parallel.0.size = 2" in found[0].fix and "executor.oversubscribe = true" in found[0].fix
    assert (
        planned(strategies(("tensor", 4), executor={"oversubscribe": True}), hardware=two).ranks
        == 4
    )
    assert planned(strategies(("tensor", 2)), hardware=two).ranks == 2
    assert (
        planned(strategies(("tensor", 4)), hardware=replace(two, hosts=2), contributed={}).hosts
        == 2
    )


def test_memory_is_shared_by_the_ranks_of_a_host(planned: Any, cpu: HardwareFacts) -> None:
    tight = replace(cpu, cpu_memory=64 << 20)
    alone = planned({}, hardware=tight).sizes.kv_bytes
    shared = planned(strategies(("tensor", 2)), hardware=tight).sizes.kv_bytes
    apart = planned(
        strategies(("tensor", 2), executor={"hosts": 2}), hardware=replace(tight, hosts=2)
    ).sizes.kv_bytes
    assert shared < alone / 2 < apart


def test_several_ranks_choose_an_executor_that_supports_them(
    planned: Any, cpu: HardwareFacts
) -> None:
    """An executor that an entry point suggests is replaced; one that the operator wrote is not."""
    for suggested in ("inline", "multiprocess"):
        plan = planned(strategies(("tensor", 2)), contributed={"executor.use": suggested})
        assert (
            plan.choice("executor").name == "multiprocess"
            and plan.choice("collectives").name == "gloo"
        )
        assert (
            planned({}, contributed={"executor.use": suggested}).choice("executor").name
            == suggested
        )
    with pytest.raises(PlanRefused, match="inline runs one rank, the plan has 2"):
        planned(strategies(("tensor", 2), executor={"use": "inline"}))


@pytest.mark.parametrize(
    ("config", "field", "reason", "fix"),
    [
        (
            strategies(("tensor", 32)),
            "parallel.0.size",
            "32 ranks need 32 devices, 2 x 8 x H200 has 2 x 8",
            "= 16",
        ),
        (
            strategies(("tensor", 16), executor={"use": "torchrun", "hosts": 4}),
            "executor.hosts",
            "has 2",
            "hosts = 2",
        ),
        (
            strategies(("tensor", 1), executor={"use": "torchrun", "hosts": 2}),
            "executor.hosts",
            "1 ranks cannot be split evenly over 2 hosts",
            "executor.hosts = 1 (--nnodes)",
        ),
        (
            strategies(("tensor", 16), executor={"use": "multiprocess"}),
            "executor.use",
            "uses one host",
            "torchrun",
        ),
        (
            strategies(("tensor", 16), executor={"use": "torchrun", "hosts": 1}),
            "parallel.0.size",
            "has 8",
            "size = 8",
        ),
    ],
)
def test_hosts(
    refusals: Refusals, config: dict[str, Any], field: str, reason: str, fix: str
) -> None:
    found = [
        r
        for r in refusals({**config, "model": V3}, hardware=read_sheet("2x8xh200"))
        if r.field == field and "splits the quantization's blocks" not in r.reason
    ]
    assert len(found) == 1 and reason in found[0].reason and fix in found[0].fix, found


def test_ranks_fill_as_few_hosts_as_hold_them(planned: Any) -> None:
    sheet = read_sheet("2x8xh200")
    assert planned(strategies(("tensor", 4)), hardware=sheet).hosts == 1
    assert planned(strategies(("tensor", 16), model=V3), hardware=sheet).hosts == 2


def test_this_machine_is_one_of_several_equal_ones(planned: Any, plugins: PluginSet) -> None:
    from glowplug.core.plan.resolve import plan as make_plan

    config = {
        "model": "embedded",
        "device": "cpu",
        **strategies(("tensor", 2)),
        "executor": {"use": "torchrun", "hosts": 2, "address": "10.0.0.1:5000"},
    }
    plan = make_plan(config, plugins=plugins)
    assert (
        plan.hosts == plan.facts.hardware.hosts == 2
        and EnginePlan.from_json(plan.to_json()).hosts == 2
    )


# ---- what is printed -----------------------------------------------------------------------------


def test_v3_over_two_hosts_prints_layout_and_bytes() -> None:
    """This is the check of the largest layout with a sheet: flags in another order, well under a
    second of work.
    """
    words = [
        "check",
        "--facts",
        "2x8xh200.json",
        "--model",
        V3,
        "--load-format",
        "dummy",
        "--enable-dp-attention",
        "--dp-size",
        "16",
        "--speculative-algorithm",
        "NEXTN",
        "--ep-size",
        "16",
        "--enable-ep-moe",
        "--tp",
        "16",
    ]
    done = glowplug(*words)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        "16 ranks over 2 hosts",
        "layout: mesh tp 16, ep 16, dp 16",
        "rank 0-7 | 8-15",
        "expert 0-15 | 16-31 | 32-47",
        "layout: dp groups 16",
        "memory: draft weights",
        "memory: page states",
        "padding: steps",
        "on each of 16 ranks, of 140.4 GiB",
    ):
        assert part in text, part


@pytest.mark.timing
def test_that_check_is_quick() -> None:
    """It takes less than a second of processor time, imports included, and loads no torch."""
    code = (
        "import sys, time; from glowplug.entrypoints.cli.main import main; "
        f"code = main(['check', '--facts', '2x8xh200', '--model', {V3!r}, '--load-format', "
        "'dummy', '--tp', '16', '--ep-size', '16', '--dp-size', '16', '--speculative-algorithm', "
        "'NEXTN', '--json']); print(code, time.process_time(), 'torch' in sys.modules, "
        "file=sys.stderr)"
    )
    seconds: list[float] = []
    paces: list[float] = []
    for _ in range(3):
        paces.append(yardstick())
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=ENVIRONMENT,
        )
        status, taken, torch = done.stderr.split()
        assert (status, torch) == ("0", "False")
        assert json.loads(done.stdout)["mesh"] == {"tp": 16, "ep": 16, "dp": 16}
        seconds.append(float(taken))
    assert min(seconds) < 1.0 * slowness(paces), (seconds, paces)


def test_v3_that_does_not_fit_is_refused_with_numbers() -> None:
    done = glowplug(
        "check", "--facts", "8xh200", "--model", V3, "--load-format", "dummy", "--tp", "4"
    )
    assert done.returncode == 2
    assert (
        "each rank needs" in done.stderr
        and "more ranks" in done.stderr
        and "140.4 GiB" in done.stderr
    )


def test_ranks_of_unequal_bytes_are_listed_apart(planned: Any, tmp_path: Path) -> None:
    from tests.support.tiny import write_config

    folder = write_config(tmp_path, "v3", vocab_size=158)
    plan = planned(strategies(("tensor", 4), model=str(folder)))
    text = " ".join(render(plan, 120).split())
    assert "memory: rank 0-2" in text and "memory: rank 3" in text and "memory: total" not in text
    assert "scored as 160 and cut back" in text
    line = next(line for line in plan.budget if line.name == "weights")
    assert line.bytes == max(line.ranks) > min(line.ranks) and line.on(3) == line.ranks[3]


def test_the_table_of_one_rank_has_no_layout(planned: Any) -> None:
    text = render(planned({}), 120)
    assert "layout:" not in text and "padding:" not in text and "on each rank" in text


def test_blocks_and_runs() -> None:
    assert blocks(16, 8, "rank") == "rank 0-7 | 8-15" and blocks(3, 1, "rank") == "rank 0 | 1 | 2"
    assert blocks(256, 16, "expert") == "expert 0-15 | 16-31 | 32-47 | ... | 240-255"
    assert list(runs([3, 3, 1, 3])) == [(0, 2), (2, 3), (3, 4)] and list(runs([5])) == [(0, 1)]
    assert BudgetLine("weights", 7, "").on(3) == 7


def test_repeated_key_heads_are_reported(planned: Any, llama: Path) -> None:
    text = " ".join(render(planned(strategies(("tensor", 4), model=str(llama))), 120).split())
    assert "num_key_value_heads 2 over 4 ranks, each on 2" in text
