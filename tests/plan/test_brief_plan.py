"""Before a start the plan shows the differences from the defaults, the memory, and how to see the
rest.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.table import render, rows
from glowplug.core.plugin.registry import PluginSet
from tests.plan.conftest import Planner
from tests.plan.test_credit import PACKAGES, written_sheet
from tests.plan.test_flags import given
from tests.support.source_tree import ROOT

V3, LITE = (
    ROOT / "models" / "shapes" / f"{name}.json" for name in ("deepseek-v3", "deepseek-v2-lite")
)


def brief(plan: EnginePlan, width: int = 120) -> list[str]:
    return render(plan, width, brief=True).splitlines()


def shown(plan: EnginePlan) -> list[str]:
    """Return the fields of the brief table without those of the memory."""
    found = [decision.field for decision in plan.decisions]
    return [line.split()[0] for line in brief(plan) if line.split("  ")[0] in found]


def test_a_plain_start_shows_the_memory_alone(planned: Planner) -> None:
    plan = planned({"weights": {"use": "random"}})
    assert shown(plan) == ["weights.use"]
    lines = brief(plan)
    assert all(any(line.startswith(f"memory: {one.name}") for line in lines) for one in plan.budget)
    assert f"fingerprint {plan.fingerprint}" in " ".join(lines[:2]) and len(lines) < 15


def test_it_names_the_option_for_the_rest_and_the_number_of_lines(planned: Planner) -> None:
    plan = planned()
    whole = len(rows(plan))
    kept = sum(line.startswith("memory: ") for line in brief(plan)) + len(shown(plan))
    assert brief(plan)[-1] == (
        f"{whole - kept} more lines have default values: --plan full, or glowplug check, "
        "shows all of them"
    )


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"scheduler": {"overlap": False}, "seed": 4}, {"scheduler.overlap", "seed"}),
        ({"collectives": {"timeout": 3.0}}, {"collectives.timeout"}),
        ({"cache": {"use": "radix"}}, {"cache.use"}),
        ({"memory": {"kv_tokens": 512}}, {"memory.kv_tokens", "kv.tokens", "context_length"}),
    ],
)
def test_options_of_the_operator_and_their_consequences_are_shown(
    planned: Planner, config: dict[str, Any], fields: set[str]
) -> None:
    plan = planned(config)
    assert set(shown(plan)) == fields | {"weights.use"}
    text = " ".join(" ".join(brief(plan)).split())
    assert ("no effect: one rank has no others to wait for" in text) == ("collectives" in config)


def test_contributed_defaults_are_shown_and_the_commands_own_are_not(
    planned: Planner,
) -> None:
    plan = planned(
        {"model": "embedded", "weights": {}}, contributed={"executor.use": "multiprocess"}
    )
    assert "outputs.0.use" in shown(plan) and "executor.use" not in shown(plan)


def test_another_component_than_the_first_is_shown_unless_the_device_is_the_reason(
    planned: Planner,
) -> None:
    assert "attention.use" not in shown(planned())  # on a CPU the earlier candidates need CUDA
    sheet = read_sheet("1xh200")
    half = {"dtype": "bfloat16", "model": str(LITE)}
    plan = planned(half, hardware=replace(sheet, packages=PACKAGES))
    assert plan.choice("attention").name == "hopper_mla" and "attention.use" not in shown(plan)
    fewer = {name: version for name, version in PACKAGES.items() if name != "sglang-kernel"}
    plan = planned(half, hardware=replace(sheet, packages=fewer))
    assert plan.choice("attention").name == "triton_mla" and "attention.use" in shown(plan)
    ranks = planned(
        {**half, "parallel": [{"use": "tensor", "size": 2}]}, hardware=read_sheet("8xh200")
    )
    assert "graphs.use" not in shown(ranks) and "collectives.use" in shown(ranks)


def test_a_device_that_is_not_used_is_shown(planned: Planner) -> None:
    sheet = replace(read_sheet("1xh200"), packages={"torch": "2.11.0+cpu"})
    assert "device" in shown(planned(hardware=sheet)) and "device" not in shown(planned())


def test_remarks_that_ask_for_something_are_shown(planned: Planner) -> None:
    sheet = read_sheet("8xh200")
    config = {"model": str(V3), "parallel": [{"use": "tensor", "size": 8}]}
    for triton, rules in (("3.6.0", False), ("3.5.0", True)):
        plan = planned(config, hardware=replace(sheet, packages={**PACKAGES, "triton": triton}))
        assert ("kernels.tables" in shown(plan)) == rules


@pytest.mark.parametrize(
    ("sheet", "words"),
    [
        ("cpu", ["--config", str(ROOT / "docs" / "examples" / "laptop.toml")]),
        ("1xh200", ["--model", str(LITE), "--load-format", "dummy"]),
        ("8xh200", ["--model", str(V3), "--load-format", "dummy", "--tp", "8", "--enable-ep-moe"]),
    ],
)
def test_the_brief_plan_is_short(
    plugins: PluginSet, tmp_path: Path, sheet: str, words: list[str]
) -> None:
    plan = given(plugins, "--facts", written_sheet(tmp_path, sheet), *words).plan()
    assert len(brief(plan)) <= 28 and len(brief(plan)) < len(render(plan, 120).splitlines()) / 2


def glowplug(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "glowplug", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "lines", "rest"),
    [
        (["--dry-run"], (30, 60), False),
        (["--dry-run", "--plan", "full"], (30, 60), False),
        (["--dry-run", "--plan", "brief"], (8, 20), True),
        (["--dry-run", "--plan", "none"], (0, 0), False),
    ],
)
def test_serve_shows_the_requested_amount(
    words: list[str], lines: tuple[int, int], rest: bool
) -> None:
    done = glowplug("serve", *words)
    assert done.returncode == 0 and done.stderr == ""
    assert (
        lines[0] <= len(done.stdout.splitlines()) <= lines[1]
        and ("--plan full" in done.stdout) == rest
    )


@pytest.mark.parametrize(
    ("words", "least", "most"),
    [([], 8, 20), (["--plan", "full"], 30, 60), (["--plan", "none"], 0, 0)],
)
def test_a_start_is_brief_by_default(words: list[str], least: int, most: int) -> None:
    """With --facts, serve shows the plan and refuses to start."""
    done = glowplug("serve", "--facts", "cpu", *words)
    plan, _, refusal = done.stderr.partition("PlanRefused")
    assert done.returncode == 2 and refusal and done.stdout == ""
    assert least <= len(plan.splitlines()) <= most


def test_check_keeps_the_whole(tmp_path: Path) -> None:
    done = glowplug("check", "--facts", "cpu")
    assert "scheduler.use " in done.stdout and "--plan full" not in done.stdout
    wrong = glowplug("serve", "--plan", "short")
    assert wrong.returncode == 2 and "brief" in wrong.stderr
