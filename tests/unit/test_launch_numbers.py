"""Our integer functions for launches give the results of Triton's functions of the same names."""

from __future__ import annotations

import ast

import pytest

from tests.support.source_tree import ROOT

triton = pytest.importorskip("triton")

from glowplug.kernels.launch.integers import cdiv, next_power_of_2  # noqa: E402

NUMBERS = [*range(1, 300), 4095, 4096, 4097, 129280, (1 << 31) - 1, 1 << 31]


def test_results_equal_tritons() -> None:
    assert [next_power_of_2(x) for x in NUMBERS] == [triton.next_power_of_2(x) for x in NUMBERS]
    for y in (1, 2, 3, 16, 127, 128, 4096):
        assert [cdiv(x, y) for x in (0, *NUMBERS)] == [triton.cdiv(x, y) for x in (0, *NUMBERS)]


def test_host_code_does_not_call_tritons_functions() -> None:
    """Triton's versions take microseconds, which would delay every launch."""
    found = []
    for path in [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "triton.cdiv",
                "triton.next_power_of_2",
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, found
