"""Small files and small functions: split before adding a second responsibility."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

from tests.support.source_tree import PACKAGES, ROOT, dotted, name_of, sources, tree

FILE_LINES = 400
FILE_CHARACTERS = 16_000
FUNCTION_LINES = 60
FUNCTION_NODES = 250
NODES_A_LINE = 8.0  #: AST nodes over all lines that are not blank
PACKED = 2.0  #: tuple assignments of several values per 1,000 lines
#: written list of files and functions over a limit with their permitted sizes; it may only shrink
OVERSIZED = Path(__file__).with_name("oversized.txt")

#: decorators of device code: its arguments are pointers, numbers and tensors of a language of its
#: own
COMPILED = {"triton.jit", "gluon.jit", "gluon.constexpr_function"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> list[Function]:
    return [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def body_lines(node: Function) -> int:
    """Return the lines of a function's body without its docstring: documentation must not count."""
    first = node.body[0]
    start = first.lineno
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        start = (first.end_lineno or start) + 1
    return (node.end_lineno or start) - start + 1


def is_compiled(node: Function) -> bool:
    """Return whether this is device code, whose length its compiler determines."""
    return any(
        dotted(mark.func if isinstance(mark, ast.Call) else mark) in COMPILED
        for mark in node.decorator_list
    )


def nodes_of(node: ast.AST) -> int:
    return sum(1 for _ in ast.walk(node))


def measured() -> dict[str, int]:
    """Return every file and function over a limit: ``"kind name" -> size``."""
    found = {}
    for path in sources():
        text = path.read_text(encoding="utf-8")
        file = name_of(path)
        sizes = {
            f"lines {file}": (len(text.splitlines()), FILE_LINES),
            f"characters {file}": (len(text), FILE_CHARACTERS),
        }
        for node in functions(path):
            if is_compiled(node):
                continue
            where = f"{file}:{node.name}"
            sizes[f"function-lines {where}"] = (body_lines(node), FUNCTION_LINES)
            sizes[f"function-nodes {where}"] = (nodes_of(node), FUNCTION_NODES)
        for name, (size, limit) in sizes.items():
            if size > limit:
                found[name] = max(size, found.get(name, 0))
    return found


def allowed() -> dict[str, int]:
    """Return the written list of exceptions: name -> permitted size."""
    lines = OVERSIZED.read_text(encoding="utf-8").splitlines()
    rows = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: int(size) for name, _, size in rows}


def test_files_and_functions_are_small() -> None:
    may = allowed()
    grown = {name: size for name, size in measured().items() if size > may.get(name, 0)}
    assert grown == {}


def test_every_listed_exception_is_needed() -> None:
    assert sorted(set(allowed()) - set(measured())) == []


def test_the_median_function_is_short() -> None:
    for package in PACKAGES:
        found = [
            node
            for path in sources()
            if path.is_relative_to(ROOT / package)
            for node in functions(path)
        ]
        assert not found or median(body_lines(node) for node in found) <= 12, package


def test_lines_are_not_packed() -> None:
    nodes = lines = packed = 0
    for path in sources():
        module = tree(path)
        nodes += nodes_of(module)
        lines += sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        packed += sum(is_packed(node) for node in ast.walk(module))
    assert nodes / lines <= NODES_A_LINE
    assert 1000 * packed / lines <= PACKED


def is_packed(node: ast.AST) -> bool:
    """Return whether this is an assignment ``a, b = x, y``."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def test_everything_public_is_annotated() -> None:
    """Require complete annotations of every function but device code, also in kernels.

    Mypy does not report them there, because compiled functions have none.
    """
    bare = []
    for path in sources():
        for node in functions(path):
            if is_compiled(node):
                continue
            several = [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *several]
            missing = [
                a.arg for a in arguments if a.annotation is None and a.arg not in {"self", "cls"}
            ]
            if missing or node.returns is None:
                bare.append(f"{name_of(path)}:{node.lineno}: {node.name}({', '.join(missing)})")
    assert bare == []
