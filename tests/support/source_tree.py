"""The repository's own sources, parsed once, for tests of the house rules."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from glowplug.core.startup.garbage import settle_memory

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "plugins", "kernels", "models", "entrypoints")


@cache
def sources() -> tuple[Path, ...]:
    """Return every Python file of the five packages and of ``src/glowplug``, the links not
    followed.
    """
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return (*found, *sorted((ROOT / "src" / "glowplug").glob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file, exempt from garbage collections.

    NOTE: collections over the two million nodes of all files take more time than the parser.
    """
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    finally:
        settle_memory()
        gc.enable()


def name_of(path: Path) -> str:
    """Return the path from the root, for messages: ``core/plan/plan.py``."""
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (dotted module, line) of every import statement, also inside functions and
    TYPE_CHECKING.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for a chain of attributes, and "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""
