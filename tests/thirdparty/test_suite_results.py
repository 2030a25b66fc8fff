"""``glowplug plugins --available --suites``: the suites of installed components, with their
results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.registry import found_entry_points
from glowplug.core.testing.harness.build import built_in
from glowplug.core.testing.installed_suites import suite_of
from glowplug.core.testing.suites.attention import MhaSuite, MlaSuite
from glowplug.core.testing.suites.cache import CacheSuite
from glowplug.core.testing.suites.ops import OpsSuite
from glowplug.core.testing.suites.parallel import CollectivesSuite, ParallelSuite
from glowplug.core.testing.suites.policy import PolicySuite
from glowplug.core.testing.suites.sampler import SamplerSuite
from glowplug.core.testing.suites.scheduler import SchedulerSuite
from glowplug.core.testing.suites.speculative import SpeculativeSuite
from glowplug.entrypoints.cli.available_plugins import available
from glowplug.entrypoints.cli.main import main
from glowplug.entrypoints.cli.suite_results import add_results, cell
from tests.faulty.test_faulty_at_start import site as site
from tests.faulty.written import COMPONENT, ORIGIN, write
from tests.thirdparty.packages import FOLDER


def results(site: Path, seconds: float = 100.0) -> dict[str, Any]:
    """Run the suites of the written plugin, and return its entry."""
    (entry,) = available([one for one in found_entry_points() if one.origin == ORIGIN])
    add_results([entry], seconds)
    return entry


def test_a_correct_component_passes_and_the_table_has_a_column(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(site, "policy")
    assert main(["plugins", "--available", "--suites"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["loads", "suite"]
    (row,) = (one.split() for one in rows if one.startswith("faulty "))
    assert row[-2:] == ["yes", "passed"]


def test_a_fault_that_only_the_suite_finds_is_named(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy preempts the first of equal sequences; it is given as JSON."""
    write(site, "policy", body="    def victim(self, running):\n        return running[0]")
    assert main(["plugins", "--available", "--suites", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (part,) = next(one for one in found if one["name"] == "faulty")["components"]
    count, _, total = part["suite"]["result"].removeprefix("failed ").partition(" of ")
    assert 1 <= int(count) < int(total)
    assert len(part["suite"]["failures"]) == int(count)
    assert any(
        one.startswith("test_a_victim_does_not_come_straight_back_first: ")
        for one in part["suite"]["failures"]
    )
    assert main(["plugins", "--available", "--suites"]) == 0
    said = capsys.readouterr().out
    assert f"faulty: policy {COMPONENT}: test_a_victim_does_not_come_straight_back_first" in said


def test_a_component_that_sleeps_has_no_result(site: Path) -> None:
    """Its process ends with the limit."""
    sleep = "    def order(self, waiting, cached):\n        time.sleep(600.0)"
    write(site, "policy", body=sleep)
    entry = results(site, seconds=2.0)
    assert cell(entry) == "no result after 2 s"


def test_a_component_that_ends_the_process_has_failed(site: Path) -> None:
    body = "    def __init__(self, *given):\n        import os\n        os._exit(3)"
    write(site, "policy", body=body)
    (part,) = results(site)["components"]
    assert part["suite"]["result"] == "failed"
    assert part["suite"]["failures"][0].startswith("exit status 3")


def test_a_component_that_cannot_be_built_has_failed(site: Path) -> None:
    write(site, "cache", changes="factory='glowplug_faulty.runtime:Absent'")
    (part,) = results(site)["components"]
    assert part["suite"]["result"] == "failed 1 of 1"
    assert "has no attribute 'Absent'" in part["suite"]["failures"][0]


@pytest.mark.parametrize(
    ("slot", "changes", "result"),
    [
        ("outputs", "", "no suite"),
        ("attention", "offers=replace(base.offers, devices=frozenset({'cuda'}))", "needs GPU"),
        ("policy", "requires=(Package('pluggy', '>=99'),)", "cannot run here"),
    ],
)
def test_components_without_a_run_say_why(site: Path, slot: str, changes: str, result: str) -> None:
    write(site, slot, changes=changes)
    assert cell(results(site)) == result


@pytest.mark.parametrize(
    ("slot", "name", "suite"),
    [
        ("attention", "torch_mla", MlaSuite),
        ("attention", "torch_mha", MhaSuite),
        ("cache", "radix", CacheSuite),
        ("collectives", "local", CollectivesSuite),
        ("ops", "torch", OpsSuite),
        ("parallel", "tensor", ParallelSuite),
        ("policy", "fcfs", PolicySuite),
        ("sampling", "torch", SamplerSuite),
        ("scheduler", "continuous", SchedulerSuite),
        ("speculative", "ngram", SpeculativeSuite),
        ("speculative", "nextn", None),
        ("quantization", "block_fp8", None),
        ("model", "llama", None),
    ],
)
def test_a_slot_has_its_suite(slot: str, name: str, suite: type | None) -> None:
    found = built_in().find(slot, name)
    assert found is not None
    made = suite_of(slot, found)
    assert made is None if suite is None else made is not None and issubclass(made, suite)


@pytest.mark.parametrize("slot", ["attention", "sampling", "speculative"])
def test_the_suite_passes_on_what_a_third_party_extends(site: Path, slot: str) -> None:
    write(site, slot)
    entry = results(site, seconds=300.0)
    assert cell(entry) == "passed", entry["components"]


@pytest.mark.parametrize(("sample", "result"), [("tiers", "passed"), ("surface", "no suite")])
def test_samples_have_their_results(
    sample: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER / f"glowplug-{sample}" / "src"))
    source = PluginSource(sample, f"glowplug_{sample}.plugin", f"glowplug-{sample}", "0.1.0")
    (entry,) = available([source])
    add_results([entry], 300.0)
    assert cell(entry) == result, entry["components"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--suites"], "--suites needs --available"),
        (["--available", "--suite-timeout", "5"], "--suite-timeout needs --suites"),
    ],
)
def test_flags_without_effect_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", *words]) != 0
    assert said in capsys.readouterr().err
