"""Packages of fact sheets: those of the ready sheets, tables in a file beside a sheet, and the
packages that count as installed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import FactsError
from glowplug.core.facts.machine import SHEETS, read_sheet, sheet_names
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plugin.component import Package
from glowplug.core.plugin.offers import PolicyOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.plugin.requirements import missing_packages
from glowplug.core.plugin.slots import SLOTS
from glowplug.core.testing.harness.fakes import component
from tests.plan.test_refusals import with_components

ROOT = Path(__file__).parents[2]
CARDS = [name for name in sheet_names() if read_sheet(name).devices]


def test_ready_sheets_state_the_packages_that_were_measured() -> None:
    """They are those of the machine of the GPU tests, and for the CPU the releases that
    constraints.txt pins, as for the library of grammars, with which every installation comes.
    """
    measured = json.loads((ROOT / "docs" / "benchmarks" / "gpu-tests.json").read_text())["packages"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert CARDS == ["1xh200", "2x8xh200", "4xh200", "8xh200"]
    for name in CARDS:
        stated = dict(read_sheet(name).packages or {})
        assert "+cu" in stated["torch"]
        assert f"llguidance=={stated.pop('llguidance')}" in pinned
        measured.pop("llguidance", None)
        assert {**stated, "torch": stated["torch"].partition("+")[0]} == measured
    stated = read_sheet("cpu").packages or {}
    assert stated.keys() == {"torch", "llguidance"} and stated["torch"].endswith("+cpu")
    assert {f"{name}=={version.partition('+')[0]}" for name, version in stated.items()} <= {*pinned}


def test_a_ready_sheet_has_what_built_ins_need_on_its_cards(plugins: PluginSet) -> None:
    """Ray and xgrammar are the exceptions: an operator chooses them."""
    packages, missing = read_sheet("1xh200").packages or {}, set()
    for slot in SLOTS:
        for found in (registration.component for registration in plugins.components(slot.name)):
            if found.offers.runs_on([90]):
                missing |= {need for need, _ in missing_packages(found, packages)}
            missing |= {names for names in found.uses.values() if not any(map(packages.get, names))}
    assert missing == {"ray>=2.40", "xgrammar>=0.2.8"}


def test_one_table_serves_all_ready_sheets_of_a_card() -> None:
    """The versions are in one file."""
    for name in CARDS:
        assert (
            json.loads((SHEETS / f"{name}.json").read_text())["packages"] == "packages/hopper.json"
        )


def sheet(folder: Path, packages: Any) -> str:
    (path := folder / "mine.json").write_text(json.dumps({"packages": packages}))
    return str(path)


def test_packages_of_a_sheet(tmp_path: Path) -> None:
    stated = {"Flashinfer_Python": "0.6.11.post1", "triton": "", "torch": "2.11.0+cu130"}
    found = {"flashinfer-python": "0.6.11.post1", "triton": "", "torch": "2.11.0+cu130"}
    assert read_sheet(sheet(tmp_path, stated)).packages == found
    (tmp_path / "table.json").write_text(json.dumps(stated))
    assert read_sheet(sheet(tmp_path, "table.json")).packages == found
    assert read_sheet(sheet(tmp_path, {})).packages == {}
    assert read_sheet(sheet(tmp_path, None)).packages is None


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, "'table.json' could not be read: No such file"),
        ("{", "'table.json' could not be read"),
        ('["triton"]', "packages"),
        ('{"triton": "latest"}', "'latest', of triton"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, table: str | None, said: str) -> None:
    if table is not None:
        (tmp_path / "table.json").write_text(table)
    with pytest.raises(FactsError, match="facts sheet .*mine.json") as caught:
        read_sheet(sheet(tmp_path, "table.json"))
    assert said in str(caught.value) and caught.value.fix


@pytest.mark.parametrize(
    ("stated", "counts"), [({}, True), ({"pluggy": ""}, False), ({"pluggy": "0.1"}, False)]
)
def test_packages_of_a_third_party_plugin_come_with_it(
    planned: Any, refused: Any, cpu: HardwareFacts, stated: dict[str, str], counts: bool
) -> None:
    """Such a package counts as on this machine unless the sheet states it; packages of built-ins do
    not.
    """
    own = with_components(
        policy=[component("policy", "needy", PolicyOffers(), requires=(Package("pluggy", ">=1"),))]
    )
    own.__dict__["software"] = replace(
        own.software, packages={**own.software.packages, "ray": "2.50"}
    )
    hardware = replace(cpu, packages={**(cpu.packages or {}), **stated})
    asked: dict[str, Any] = {"policy": {"use": "needy"}}
    if counts:
        plan = planned(asked, plugins=own, hardware=hardware)
        packages = plan.facts.software.packages
        assert packages.keys() == {"torch", "llguidance", "pluggy"}
        said = next(decision for decision in plan.decisions if decision.field == "packages")
        sheet = f"llguidance {packages['llguidance']}, torch 2.13.0+cpu"
        assert said.why == f"{sheet}; from here: pluggy {packages['pluggy']}"
    else:
        assert (
            "needy needs pluggy>=1"
            in refused(asked, plugins=own, hardware=hardware)["policy.use"].reason
        )


def test_a_package_that_a_sheet_lacks_is_installed_there(refused: Any, cpu: HardwareFacts) -> None:
    """Installing it on this machine would not help."""
    asked = {"executor": {"use": "ray"}}
    fix = refused(asked, hardware=cpu)["executor.use"].fix
    assert (
        fix
        == 'pip install "ray>=2.40" on that machine, and a sheet that states it (glowplug facts)'
    )
    assert (
        refused(asked, hardware=replace(cpu, packages=None))["executor.use"].fix
        == 'pip install "ray>=2.40"'
    )
