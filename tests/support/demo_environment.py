"""The environment that ``make demo`` makes, from packages installed here: links, without
downloads.

A virtual environment whose site-packages links to the distributions that the project's own
dependencies require, those of no extra among them, and to nothing else. A package that only the
tests install, or triton beside a CPU build of torch, cannot be imported there and has no metadata.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.source_tree import ROOT


def dependencies(*extras: str) -> dict[str, Distribution]:
    """Return the installed distributions of the project's dependencies and of theirs, by normalised
    name.

    Args:
        extras: the project's extras whose packages are among them.

    Raises:
        PackageNotFoundError: One of them is not installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in project["dependencies"]]
    for extra in extras:
        waiting += map(Requirement, project["optional-dependencies"][extra])
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            found[name] = importlib.metadata.distribution(name)
            waiting += [
                needed
                for needed in map(Requirement, found[name].requires or ())
                if needed.marker is None or needed.marker.evaluate({"extra": extra})
            ]
    return found


def link(distribution: Distribution, site: Path) -> None:
    """Link the packages, modules and metadata of a distribution into ``site``. A folder without
    ``__init__.py`` may be shared by several distributions: it is made, and its content is
    linked.
    """
    base = Path(str(distribution.locate_file("")))
    done: set[PurePath] = set()
    for file in distribution.files or ():
        if file.parts[0] in {"..", "__pycache__"}:
            continue
        for depth in range(1, len(file.parts) + 1):
            part = PurePath(*file.parts[:depth])
            if part in done:
                break
            if depth == len(file.parts) or (base / part / "__init__.py").exists():
                done.add(part)
                (site / part).parent.mkdir(parents=True, exist_ok=True)
                (site / part).symlink_to(base / part)
                break


def make(folder: Path, *extras: str) -> Path:
    """Make the environment in ``folder`` with this tree as its glowplug, and return its
    interpreter.

    Args:
        folder: the folder to make.
        extras: the project's extras whose packages are in it.
    """
    venv.create(folder, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    for distribution in dependencies(*extras).values():
        link(distribution, site)
    (site / "glowplug.pth").write_text(f"{ROOT / 'src'}\n")
    return folder / "bin" / "python"


@cache
def _place() -> tuple[TemporaryDirectory[str], Path]:
    place = tempfile.TemporaryDirectory(prefix="glowplug-demo-")  # removed with the process
    return place, make(Path(place.name))


def python() -> Path:
    """Return the environment's interpreter, which is made once a process."""
    return _place()[1]


def variables() -> dict[str, str]:
    """Return the environment variables of commands there: HOME and the number of threads are this
    process's.
    """
    kept = {
        name: value for name, value in os.environ.items() if name in ("HOME", "OMP_NUM_THREADS")
    }
    return {**kept, "PATH": "/usr/bin:/bin", "COLUMNS": "120"}


def run(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the environment's interpreter with ``words`` in the repository's root."""
    return subprocess.run(
        [python(), *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        check=False,
        env=variables(),
    )


#: run each command line of the argument, a JSON list, and print their statuses and outputs
COMMANDS = """
import contextlib, io, json, sys
from glowplug.entrypoints.cli.main import main

found = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
    found.append((status, said.getvalue()))
print(json.dumps(found))
"""


def glowplug_each(lines: Iterable[Sequence[str]]) -> list[tuple[int, str]]:
    """Run ``glowplug`` with the words of each line there, all in one process.

    Returns:
        The exit status and the output of each.
    """
    done = run("-c", COMMANDS, json.dumps([list(words) for words in lines]))
    assert done.returncode == 0, done.stderr
    return [(status, said) for status, said in json.loads(done.stdout)]


def glowplug(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run ``glowplug`` with ``words`` there."""
    return run("-m", "glowplug", *words, timeout=timeout)
