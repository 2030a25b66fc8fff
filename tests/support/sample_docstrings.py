"""Draw docstrings at random, to be read without the code.

``python -m tests.support.sample_docstrings SEED [COUNT]`` prints JSON: place, signature and
docstring of each. docs/benchmarks/docstring-verdicts.json holds a sample with its verdicts.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from tests.support.source_tree import name_of, sources, tree

Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented() -> list[tuple[str, Documented]]:
    """Return (place, node) of every class and function with a docstring in the five packages.

    Places name the class of a method, as an editor shows it.
    """
    return [
        (f"{name_of(path)}:{name}", node)
        for path in sources()
        for name, node in definitions(tree(path), "")
        if ast.get_docstring(node)
    ]


def definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, Documented]]:
    """Yield (qualified name, node) of the classes and functions inside ``parent``."""
    for node in ast.iter_child_nodes(parent):
        inside = prefix
        if isinstance(node, Documented):
            yield prefix + node.name, node
            inside = f"{prefix}{node.name}."
        yield from definitions(node, inside)


def signature(node: Documented) -> str:
    """Return the first line of a definition without its body."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def sample(seed: int, count: int) -> list[dict[str, Any]]:
    """Return ``count`` docstrings, which depend on the seed and the sources only."""
    drawn = random.Random(seed).sample(sorted(documented(), key=lambda found: found[0]), count)
    return [
        {"place": place, "signature": signature(node), "docstring": ast.get_docstring(node)}
        for place, node in drawn
    ]


if __name__ == "__main__":
    print(json.dumps(sample(int(sys.argv[1]), int((sys.argv[2:] or ["60"])[0])), indent=1))
