"""Checks that all sample distributions of third parties share."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
#: modules that third parties may import (docs/writing-a-plugin.md)
PUBLIC = re.compile(
    r"glowplug\.core\.(api|protocols|text\.tokenizer|(layers|step|speculation)(\..*)?)"
)
PARENTS = ("glowplug", "glowplug.core")  #: packages whose names are modules
MOST_LINES = 150  #: most lines of a sample's modules together


def private_imports(name: str) -> list[str]:
    """Return the modules of glowplug that a sample imports and that are not public."""
    return private_modules(FOLDER / name / "src")


def private_modules(source: Path) -> list[str]:
    """Return the modules of glowplug that modules under ``source`` import, without public ones."""
    modules = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules |= imported_from(str(node.module), [one.name for one in node.names])
            if isinstance(node, ast.Import):
                modules |= {one.name for one in node.names}
    modules = {module for module in modules if module.split(".")[0] == "glowplug"}
    assert modules, "nothing of glowplug is imported"
    return [module for module in sorted(modules) if not PUBLIC.fullmatch(module)]


def imported_from(module: str, names: list[str]) -> set[str]:
    """Return the modules from which ``from module import names`` takes its names.

    A name that is a package's own module counts as that module: ``from glowplug.core import plan``
    imports ``glowplug.core.plan``.
    """
    if module in PARENTS:
        return {f"{module}.{name}" for name in names}
    return {module}


def lines_of(name: str) -> int:
    """Return the number of lines of a sample's modules, without blank ones at their ends."""
    return sum(len(path.read_text().splitlines()) for path in (FOLDER / name / "src").rglob("*.py"))


def install(folder: Path, *names: str) -> Path:
    """Install samples as wheels under ``folder``, and return the folder with their packages."""
    target = folder / "site"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    sources = [folder / "source" / name for name in names]
    for name, source in zip(names, sources):
        shutil.copytree(FOLDER / name, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(target), *map(str, sources)],
        check=True,
        timeout=240,
    )
    return target


def run_installed(target: Path, *words: str) -> str:
    """Run Python with the packages of ``target`` and return what it printed."""
    paths = {"PYTHONPATH": os.pathsep.join([str(target), str(ROOT / "src")])}
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **paths},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
