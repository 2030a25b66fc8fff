"""Imports point one way, and the plan zone stays free of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pace import child, slowness, yardstick
from tests.support.source_tree import ROOT, imported, name_of, sources

#: package -> our packages that it may import
MAY_IMPORT = {
    "kernels": {"kernels"},
    "core": {"core"},
    "models": {"models", "core"},
    "plugins": {"plugins", "core", "kernels"},
    "entrypoints": {"entrypoints", "core"},
}
#: third-party packages that core may import -> their purpose
CORE_THIRD_PARTY = {
    "pluggy": "hooks",
    "pydantic": "config",
    "pydantic_core": "config errors",
    "msgspec": "messages",
    "numpy": "rows",
    "torch": "run zone",
    "yaml": "config files",
    "packaging": "version requirements",
    "tokenizers": "the tokenizer",
    "jinja2": "chat templates",
    "tqdm": "progress bars",
}
#: folders and modules of core that import without torch
PLAN_ZONE = (
    "errors",
    "facts",
    "plugin",
    "config",
    "plan",
    "protocols",
    "step.request",
    "step.messages",
    "step.batch",
    "step.sequence_table",
    "step.structured",
)


def ours(module: str) -> str | None:
    """Return our package that a dotted import reaches, or None."""
    parts = module.split(".")
    return parts[1] if parts[0] == "glowplug" and len(parts) > 1 else None


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources():
        home = path.relative_to(ROOT).parts[0]
        if home not in MAY_IMPORT:
            continue
        for module, line in imported(path):
            target = ours(module)
            if target in MAY_IMPORT and target not in MAY_IMPORT[home]:
                wrong.append(f"{name_of(path)}:{line}: {home} must not import {module}")
    assert wrong == []


def test_a_plugin_does_not_import_another_slots_plugin() -> None:
    wrong = []
    for path in sources():
        parts = path.relative_to(ROOT).parts
        if parts[0] != "plugins" or len(parts) < 3:
            continue
        for module, line in imported(path):
            target = module.split(".")
            if target[:2] == ["glowplug", "plugins"] and len(target) > 2 and target[2] != parts[1]:
                wrong.append(f"{name_of(path)}:{line}: {module}")
    assert wrong == []


def test_core_imports_few_others() -> None:
    wrong = []
    for path in sources():
        parts = path.relative_to(ROOT).parts
        if parts[0] != "core" or parts[1] == "testing":
            continue
        for module, line in imported(path):
            top = module.split(".")[0]
            if (
                top not in CORE_THIRD_PARTY
                and top != "glowplug"
                and top not in sys.stdlib_module_names
            ):
                wrong.append(f"{name_of(path)}:{line}: {module}")
    assert wrong == []


def test_imports_are_absolute_and_through_glowplug() -> None:
    wrong = []
    for path in sources():
        for module, line in imported(path):
            if module.startswith(".") or module.split(".")[0] in MAY_IMPORT:
                wrong.append(f"{name_of(path)}:{line}: {module}")
    assert wrong == []


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_zone_and_plugin_declarations_import_without_torch() -> None:
    core = ROOT / "core"
    missing = [
        name
        for name in PLAN_ZONE
        if not (core / name.replace(".", "/")).is_dir()
        and not (core / f"{name.replace('.', '/')}.py").exists()
    ]
    assert missing == []
    zone = [
        ".".join(path.relative_to(core).with_suffix("").parts)
        for path in sources()
        if path.is_relative_to(core)
    ]
    zone = [
        name
        for name in zone
        if name.startswith(tuple(f"{part}." for part in PLAN_ZONE)) or name in PLAN_ZONE
    ]
    heavy = json.loads(
        run_python(
            "import importlib, json, sys\n"
            f"for name in {zone!r}: importlib.import_module('glowplug.core.' + name)\n"
            "from glowplug.plugins.built_in import DEFAULT_PLUGINS\n"
            "for name in DEFAULT_PLUGINS: importlib.import_module(name)\n"
            "import glowplug.entrypoints.cli.main\n"
            "heavy = ['torch', 'transformers', 'triton', 'fastapi', 'uvicorn', 'safetensors']\n"
            "print(json.dumps([name for name in heavy if name in sys.modules]))"
        )
    )
    assert heavy == []


@pytest.mark.timing
def test_check_takes_under_a_second() -> None:
    """The limit is in processor time and includes the start of the interpreter."""
    command = [sys.executable, "-m", "glowplug", "check", "--model", "embedded"]
    seconds: list[float] = []
    paces: list[float] = []
    for _ in range(3):
        paces.append(yardstick())
        done, taken = child(command, {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"})
        seconds.append(taken)
        assert done.returncode == 0, done.stdout + done.stderr
    assert min(seconds) < 1.0 * slowness(paces), (seconds, paces)


def test_no_module_is_named_like_a_standard_one() -> None:
    """A plugin ``queue.py`` run as a script would shadow the standard library's."""
    clashes = [
        name_of(path)
        for path in sources()
        if path.parent == ROOT / "src" / "glowplug" and path.stem in sys.stdlib_module_names
    ]
    assert clashes == []
    assert Path(ROOT / "core" / "__init__.py").exists()
