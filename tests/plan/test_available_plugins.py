"""``glowplug plugins --available``: installed plugins, also those that cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.cli.available_plugins import available
from glowplug.entrypoints.cli.main import main

COMPONENT = """
from typing import Literal

from glowplug.core.api import {base}Offers, {base}Options, Component, hookimpl

class Options({base}Options):
    use: Literal["{name}"] = "{name}"

@hookimpl
def {hook}():
    offers = {base}Offers()
    return [Component("{name}", Options, "made:Made", offers=offers, contract={contract})]
"""
POLICY = {"base": "Policy", "hook": "register_scheduling_policies", "contract": 2}
OLD = {"base": "Attention", "hook": "register_attention_backends", "contract": 1}


def install(site: Path, distribution: str, entry: str, module: str, source: str) -> None:
    """Write a module and the metadata of the distribution that has it as an entry point."""
    info = site / f"{distribution.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[glowplug]\n{entry} = {module}\n")
    (site / f"{module}.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main(["plugins", "--available", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    return {one["distribution"]: one for one in found}


def test_plugins_are_listed_whether_they_load_or_not(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = COMPONENT.format(name="avail_good", **POLICY)
    install(site, "dist-good", "good", "avail_good", good)
    install(site, "dist-broken", "broken", "avail_broken", "import no_such_module_at_all")
    install(site, "dist-old", "old", "avail_old", COMPONENT.format(name="avail_old", **OLD))
    found = listed(capsys)
    part = {
        "slot": "policy",
        "name": "avail_good",
        "contract": 2,
        "why_not": "",
        "needs_gpu": False,
    }
    assert found["dist-good"] == {
        "name": "good",
        "target": "avail_good",
        "distribution": "dist-good",
        "version": "1.5",
        "hooks": ["register_scheduling_policies"],
        "components": [part],
        "loads": True,
        "why_not": "",
    }
    assert not found["dist-broken"]["loads"]
    assert "no_such_module_at_all" in found["dist-broken"]["why_not"]
    assert found["dist-old"]["components"][0]["contract"] == 1
    assert "written for contract 1" in found["dist-old"]["why_not"]
    assert main(["plugins", "--available"]) == 0
    rows = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["good"].split()[1:] == ["dist-good", "1.5", "policy", "avail_good", "2", "yes"]
    assert rows["broken"].split()[1:] == ["dist-broken", "1.5", "no"]
    assert "1 (now 2)" in rows["old"]


def test_names_that_are_taken_are_reasons(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "dist-a", "same", "avail_a", COMPONENT.format(name="avail_a", **POLICY))
    install(site, "dist-b", "same", "avail_b", COMPONENT.format(name="avail_b", **POLICY))
    install(site, "dist-c", "taken", "avail_c", COMPONENT.format(name="fcfs", **POLICY))
    found = listed(capsys)
    one = [found[name] for name in ("dist-a", "dist-b")]
    assert sorted(entry["loads"] for entry in one) == [False, True]
    assert any("has an entry point of this name" in entry["why_not"] for entry in one)
    assert "two plugins register policy 'fcfs'" in found["dist-c"]["why_not"]


def test_modules_are_listed_and_blocked_plugins_are_not_loaded(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "dist-d", "d", "avail_d", "raise SystemExit")
    (site / "avail_module.py").write_text(COMPONENT.format(name="avail_module", **POLICY))
    found = listed(capsys, "--plugin", "avail_module", "--block-plugin", "d")
    assert found["dist-d"]["why_not"] == "blocked by --block-plugin"
    assert found["module avail_module"]["loads"]


def test_a_plugin_that_hangs_does_not_hide_the_others(site: Path) -> None:
    (site / "avail_hangs.py").write_text("import time\ntime.sleep(20)\n")
    (site / "avail_next.py").write_text(COMPONENT.format(name="avail_next", **POLICY))
    sources = [PluginSource(name, name, "dist", "1.0") for name in ("avail_hangs", "avail_next")]
    load_plugins(entry_points=False)  # imports the built-in ones, without the short time limit
    first, second = available(sources, timeout=2.0)
    assert "did not finish loading" in first["why_not"] and second["loads"]
