"""The five packages at the top and the five links in ``src/glowplug`` are the same."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from tests.support.source_tree import PACKAGES, ROOT, name_of, sources


def test_links_and_top_level_packages_agree() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    links = {
        path.name: os.readlink(path)
        for path in (ROOT / "src" / "glowplug").iterdir()
        if path.is_symlink()
    }
    assert packages == set(PACKAGES)
    assert links == {name: f"../../{name}" for name in PACKAGES}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_is_imported_through_its_link(name: str) -> None:
    module = importlib.import_module(f"glowplug.{name}")
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"


def test_every_folder_with_modules_is_a_package() -> None:
    """Setuptools leaves a folder without ``__init__.py`` out of the wheel."""
    folders = {path.parent for path in sources()} - {ROOT / "src" / "glowplug"}
    assert [
        name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()
    ] == []


def test_the_top_folder_holds_only_known_entries() -> None:
    for name in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "LICENSE",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        ".pre-commit-config.yaml",
        ".ci/run",
        "docs",
        "tests",
    ):
        assert (ROOT / name).exists(), name
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_constraints_pin_every_direct_dependency() -> None:
    import re
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["docs"]]
    names = {re.split(r"[<>=;\[ ]", line)[0].lower() for line in wanted}
    pinned = {
        re.split(r"[<>=]", line)[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#") and re.search(r"[<=]=", line)
    }  # pinned exactly, or with an upper bound
    assert names - pinned == set()


def test_core_dependencies_carry_no_kernel_library() -> None:
    import tomllib

    text = " ".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    for library in ("triton", "flashinfer", "sgl", "vllm", "deep"):
        assert library not in text
