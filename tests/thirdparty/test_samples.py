"""Every sample distribution is small, imports the public interface, runs its suite, is listed."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.registry import PluginSet
from tests.thirdparty.packages import (
    FOLDER,
    MOST_LINES,
    ROOT,
    install,
    lines_of,
    private_imports,
    private_modules,
    run_installed,
)

#: sample -> module of its slot's conformance suite; None: no slot, hence no suite
SUITES = {
    "chunked": "attention",
    "deadline": "policy",
    "gguf": "weights",
    "hermes": "parser",
    "int4": "quantization",
    "lines": "speculative",
    "messages": None,
    "ngram": "speculative",
    "qwen": "models",
    "surface": None,
    "tiers": "tiers",
}
LONG = {"gguf"}  #: samples with more lines
ROW = re.compile(
    r"\| \[glowplug-(\w+)\]\(\.\./tests/thirdparty/glowplug-\1\) \| (\w+) \| (\d+) \| (.+) \|"
)
ROWS = {row[1]: row for row in ROW.finditer((ROOT / "docs" / "samples.md").read_text())}
samples = pytest.mark.parametrize("sample", SUITES)


def test_every_sample_is_checked_and_listed() -> None:
    found = {path.name.removeprefix("glowplug-") for path in FOLDER.glob("glowplug-*/")}
    assert found == set(SUITES) == set(ROWS)


@samples
def test_a_sample_has_the_lines_that_the_docs_state(sample: str) -> None:
    lines = lines_of(f"glowplug-{sample}")
    assert lines == int(ROWS[sample][3])
    assert (lines > MOST_LINES) == (sample in LONG)


@samples
def test_a_sample_imports_the_public_interface_only(sample: str) -> None:
    assert private_imports(f"glowplug-{sample}") == []


@pytest.mark.parametrize(
    "text",
    [
        "from glowplug.core.plan.plan import EnginePlan",
        "from glowplug.core import plan",
        "from glowplug import plugins",
        "import glowplug.models.llama",
        "from glowplug.core.protocols.front import Piece",
        "from glowplug.core.api_of_others import Piece",
    ],
)
def test_private_imports_are_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(f"from glowplug.core.api import Component\n{text}\n")
    assert len(private_modules(tmp_path)) == 1


@samples
def test_the_suite_of_a_sample_is_run(sample: str) -> None:
    suite = SUITES[sample]
    classes = suites_in((FOLDER / f"test_{sample}.py").read_text())
    assert bool(classes) == (suite is not None)
    assert suite is None or f"glowplug.core.testing.suites.{suite}" in classes


def suites_in(text: str) -> list[str]:
    """Return the modules of the conformance suites that a module's test classes derive from."""
    tree = ast.parse(text)
    origins = {
        name.asname or name.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    found = set()
    for node in tree.body:  # a class follows its base
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in origins:
                    origins[node.name] = origins[base.id]
            if node.name.startswith("Test") and node.name in origins:
                found.add(origins[node.name])
    return sorted(one for one in found if one.startswith("glowplug.core.testing.suites."))


@samples
def test_a_sample_registers_in_the_slot_that_the_docs_state(
    sample: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER / f"glowplug-{sample}" / "src"))
    source = PluginSource(sample, f"glowplug_{sample}.plugin", f"glowplug-{sample}", "0.1.0")
    rows = {slot for slot, names in components_of(source).items() if names}
    assert rows == ({ROWS[sample][2]} - {"none"})


WORKS = """
import importlib, json, sys
from types import SimpleNamespace

for module in sys.argv[1:]:
    importlib.import_module(module)
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.cli.commands.plugins import listing
from glowplug.entrypoints.server.app import create_app

plugins = load_plugins()
plan = make_plan({"model": "embedded", "device": "cpu"}, plugins=plugins)
client = SimpleNamespace(stats=dict, group_stats=dict)
app = create_app(plan, client, None, [], plugins)
print(json.dumps({"plugins": listing(plugins), "routes": [*app.openapi()["paths"]]}))
"""
#: sample -> a route of it, and a command line with what it prints
SURFACES: dict[str, tuple[str, list[str], str]] = {
    "messages": ("/messages", ["ask", "--help"], "most tokens of the answer"),
    "surface": ("/continue", ["shout", "hello"], "HELLO"),
}


@dataclass
class Installed:
    """The folder with the packages of all samples, and what a process with all of them found."""

    target: Path
    found: dict[str, Any]


def files_of(sample: str) -> set[str]:
    """Return the modules of a sample, relative to its source folder."""
    source = FOLDER / f"glowplug-{sample}" / "src"
    return {str(path.relative_to(source)) for path in source.rglob("*.py")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheels")
    target = install(folder, *(f"glowplug-{sample}" for sample in SUITES))
    modules = [
        file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for sample in SUITES
        for file in sorted(files_of(sample))
    ]
    return Installed(target, json.loads(run_installed(target, "-c", WORKS, *modules)))


@samples
def test_a_sample_works_when_installed_as_a_wheel(sample: str, installed: Installed) -> None:
    """The wheel has all modules and the entry point; components, routes and commands are found."""
    target = installed.target
    package = target / f"glowplug_{sample}"
    assert files_of(sample) == {str(path.relative_to(target)) for path in package.rglob("*.py")}
    (entry,) = (
        one for one in installed.found["plugins"] if one["distribution"] == f"glowplug-{sample}"
    )
    assert entry["version"] == "0.1.0"
    slots = {one["slot"] for one in entry["components"]}
    assert slots == ({ROWS[sample][2]} - {"none"})
    if sample in SURFACES:
        route, words, said = SURFACES[sample]
        assert route in installed.found["routes"]
        assert said in run_installed(target, "-m", "glowplug", *words)


def components_of(source: PluginSource) -> dict[str, list[str]]:
    """Return the names of a plugin's components by slot."""
    from glowplug.core.plugin.slots import SLOTS

    plugins = PluginSet([source])
    return {
        slot.name: [one.component.name for one in plugins.components(slot.name)] for slot in SLOTS
    }
