"""Checks that all sample distributions of third parties share."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
#: modules of core that third parties may import
PUBLIC = ("api", "layers", "step", "protocols", "speculation", "testing")
MOST_LINES = 150  #: most lines of a sample's modules together


def private_imports(name: str) -> list[str]:
    """Return the modules of glowplug that a sample imports and that are not public."""
    modules = set()
    for path in (FOLDER / name / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("glowplug."):
                modules.add(str(node.module))
            if isinstance(node, ast.Import):
                modules |= {one.name for one in node.names if one.name.startswith("glowplug.")}
    assert modules, "the sample imports nothing of glowplug"
    allowed = tuple(f"glowplug.core.{part}" for part in PUBLIC)
    return [module for module in sorted(modules) if not module.startswith(allowed)]


def lines_of(name: str) -> int:
    """Return the number of lines of a sample's modules, without blank ones at their ends."""
    return sum(len(path.read_text().splitlines()) for path in (FOLDER / name / "src").rglob("*.py"))


def listed_when_installed(name: str, folder: Path) -> list[list[str]]:
    """Install a sample as a wheel under ``folder``, and return its rows of ``glowplug plugins``.

    Each row is slot, name of the component, plugin, distribution, version and contract.
    """
    source, target = folder / "source", folder / "site"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(FOLDER / name, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(target), str(source)],
        check=True,
        timeout=240,
    )
    paths = {"PYTHONPATH": os.pathsep.join([str(target), str(ROOT / "src")])}
    listed = subprocess.run(
        [sys.executable, "-m", "glowplug", "plugins"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, **paths},
    )
    return [line.split()[:6] for line in listed.stdout.splitlines() if f" {name} " in line]
