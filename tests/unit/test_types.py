"""Types are checked in all packages: mypy strict, device code of kernels left out."""

from __future__ import annotations

import tomllib
from functools import cache
from typing import Any

from tests.support.source_tree import PACKAGES, ROOT, name_of, sources
from tests.unit.test_sizes import functions, is_compiled

STRICT_SHARE = 0.9  #: share of all lines that strict checks have to cover
#: options that an override may relax, and for which modules: device code has no annotations, and
#: torch's stubs give results of torch.nn modules and of arithmetic with numbers as Any
RELAXED = {
    "glowplug.kernels.*": {
        "disallow_untyped_defs",
        "disallow_incomplete_defs",
        "disallow_untyped_decorators",
        "disallow_untyped_calls",
        "check_untyped_defs",
    },
    "glowplug.models.embedded.*": {"warn_return_any"},
}


@cache
def mypy() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings: dict[str, Any] = table["tool"]["mypy"]
    return settings


def test_mypy_is_strict_for_every_package() -> None:
    assert mypy()["strict"] is True
    assert set(mypy()["packages"]) == {f"glowplug.{package}" for package in PACKAGES}


def test_overrides_relax_only_what_is_listed() -> None:
    relaxed: dict[str, set[str]] = {}
    for override in mypy()["overrides"]:
        modules = override["module"]
        for module in [modules] if isinstance(modules, str) else modules:
            if module.startswith("glowplug"):
                relaxed.setdefault(module, set()).update(set(override) - {"module"})
    assert relaxed == RELAXED


def test_strict_checks_cover_most_lines() -> None:
    """Count lines of compiled functions as unchecked, all others of listed packages as checked."""
    total = unchecked = 0
    for path in sources():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        total += lines
        if f"glowplug.{name_of(path).partition('/')[0]}" not in mypy()["packages"]:
            unchecked += lines
            continue
        unchecked += sum(
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in functions(path)
            if is_compiled(node)
        )
    share = 1 - unchecked / total
    print(f"{share:.1%} of {total} lines are under strict checks")
    assert share >= STRICT_SHARE
