"""Small files and small functions: split before adding a second responsibility."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

from tests.support.source_tree import PACKAGES, ROOT, dotted, name_of, sources, tree

FILE_LINES = 400
FUNCTION_LINES = 60
#: file -> (limit, why it is one piece)
LARGER_FILES: dict[str, tuple[int, str]] = {}
#: "file:function" -> (limit, why it is one piece)
LARGER_FUNCTIONS: dict[str, tuple[int, str]] = {}

#: decorators of device code, whose arguments are pointers, numbers and tensors of a language of its
#: own
COMPILED = {"triton.jit", "gluon.jit", "gluon.constexpr_function"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> list[Function]:
    return [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def length(node: Function) -> int:
    """Lines from ``def`` to the end, the docstring not counted: documenting must not be punished."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_files_are_small() -> None:
    long = []
    for path in sources():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        limit, _ = LARGER_FILES.get(name_of(path), (FILE_LINES, ""))
        if lines > limit:
            long.append(f"{name_of(path)}: {lines} lines, at most {limit}")
    assert long == []


def test_functions_are_small() -> None:
    long = []
    for path in sources():
        for node in functions(path):
            limit, _ = LARGER_FUNCTIONS.get(f"{name_of(path)}:{node.name}", (FUNCTION_LINES, ""))
            if length(node) > limit:
                long.append(
                    f"{name_of(path)}:{node.lineno}: {node.name} has {length(node)} lines, at most {limit}"
                )
    assert long == []


def test_the_median_function_is_short() -> None:
    for package in PACKAGES:
        lengths = [
            length(node)
            for path in sources()
            if path.is_relative_to(ROOT / package)
            for node in functions(path)
        ]
        assert not lengths or median(lengths) <= 12, (package, median(lengths))


def test_allowances_are_still_needed() -> None:
    for name in LARGER_FILES:
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) > FILE_LINES, name


def test_everything_public_is_annotated() -> None:
    """Full annotations everywhere; mypy's strict mode covers the core, this the rest."""
    bare = []
    for path in sources():
        for node in functions(path):
            if any(
                dotted(mark.func if isinstance(mark, ast.Call) else mark) in COMPILED
                for mark in node.decorator_list
            ):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            missing = [
                a.arg for a in arguments if a.annotation is None and a.arg not in {"self", "cls"}
            ]
            if missing or node.returns is None:
                bare.append(f"{name_of(path)}:{node.lineno}: {node.name}({', '.join(missing)})")
    assert bare == []
