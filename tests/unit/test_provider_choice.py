"""The GEMM provider of linear layers in int8 and int4: the GPU's table by shape and rows, and rules
without a table.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.plugins.quantization.awq import cuda as awq_cuda
from glowplug.plugins.quantization.block_fp8.gemm_providers import Providers
from glowplug.plugins.quantization.int8 import cuda as int8_cuda
from glowplug.plugins.quantization.shared import libraries, provider_choice
from glowplug.plugins.quantization.shared.provider_choice import (
    AWQ,
    AWQ_ROWS,
    INT8,
    INT8_ROWS,
    ByShape,
)

CARD = "NVIDIA H200"
RECORD = json.loads(
    (Path(__file__).parents[2] / "docs" / "benchmarks" / "narrow-h200.json").read_text()
)["linear"]
COLUMNS = {name: number for number, name in enumerate(RECORD["columns"])}
OURS_AND_OTHERS = {
    "int8_gemm": {"triton": "int8 triton", "cutlass": "int8 cutlass"},
    "awq_gemm": {"triton": "awq triton", "cublas": "awq dequantised, cublas"},
}
TABLE = {
    "N=512,K=256": {"8": "triton", "32": "cutlass", "128": "triton"},
    "N=4096,K=256": {"1": "cutlass", "4096": "cutlass"},
}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured GPU, with CUTLASS installed."""
    monkeypatch.setattr(tuned, "device_name", lambda: tuned.spelt(CARD))
    monkeypatch.setattr(provider_choice, "installed", {"triton": "3.6.0"}.get)
    monkeypatch.setattr(
        libraries.importlib, "import_module", lambda name: SimpleNamespace(int8_scaled_mm=print)
    )


def picks(kind: str, table: Any = None, wanted: str = "auto") -> Any:
    """Return the runtime's choice of provider as a function of (rows, columns, depth)."""
    if kind == AWQ.kind:
        return awq_cuda.AwqGemm(wanted, table).pick
    multiply = int8_cuda.Int8Gemm(wanted, table)
    return lambda *shape: multiply.pick(*shape, torch.bfloat16)


@pytest.mark.parametrize("kind", [INT8.kind, AWQ.kind])
def test_every_measured_shape_gets_its_fastest_provider(kind: str, card: None) -> None:
    pick, seen = picks(kind), set()
    for shape, by_rows in RECORD["rows"].items():
        columns, depth = map(int, shape.split("x"))
        for rows, times in by_rows.items():
            found = {
                name: spent
                for name, column in OURS_AND_OTHERS[kind].items()
                if (spent := times[COLUMNS[column]]) is not None
            }
            seen.add(pick(int(rows), columns, depth))
            assert pick(int(rows), columns, depth) == min(found, key=lambda name: found[name]), (
                shape,
                rows,
            )
    assert seen == set(OURS_AND_OTHERS[kind]), "no table of one word"
    assert len(provider_choice.measured(kind, CARD)) == len(RECORD["rows"])


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "depth", "name"),
    [
        ("int8_gemm", 79, 2048, 2048, "triton"),
        ("int8_gemm", 80, 2048, 2048, "cutlass"),
        ("int8_gemm", 4, 21888, 2048, "cutlass"),
        ("int8_gemm", 5, 21888, 2048, "triton"),
        ("int8_gemm", 575, 2048, 10944, "triton"),
        ("int8_gemm", 576, 2048, 10944, "cutlass"),
        ("int8_gemm", 16384, 2048, 10944, "cutlass"),
        ("int8_gemm", 0, 2048, 2048, "triton"),
        ("awq_gemm", 575, 21888, 2048, "triton"),
        ("awq_gemm", 576, 21888, 2048, "cublas"),
        ("awq_gemm", 0, 21888, 2048, "triton"),
        ("awq_gemm", 16384, 21888, 2048, "cublas"),
    ],
)
def test_the_provider_changes_at_each_row_boundary(
    kind: str, rows: int, columns: int, depth: int, name: str, card: None
) -> None:
    assert picks(kind)(rows, columns, depth) == name


@pytest.mark.parametrize(
    ("columns", "depth", "near"),
    [
        (1448, 256, "N=512,K=256"),
        (1449, 256, "N=4096,K=256"),
        (16, 16, "N=512,K=256"),
        (1 << 20, 1 << 20, "N=4096,K=256"),
        (1024, 1 << 15, "N=512,K=256"),
        (2048, 1 << 15, "N=4096,K=256"),
    ],
)
def test_other_shapes_use_the_nearest_measured_shape(columns: int, depth: int, near: str) -> None:
    """Distances are ratios: 1,448 / 512 equals 4,096 / 1,448."""
    chosen = ByShape(INT8.kind, INT8_ROWS, TABLE)
    for rows in (1, 8, 19, 20, 21, 32, 79, 80, 81, 4000):
        assert chosen.pick(rows, columns, depth) == chosen.pick(rows, *provider_choice.sizes(near))


def test_of_two_equally_near_row_counts_the_larger_decides() -> None:
    chosen = ByShape(INT8.kind, INT8_ROWS, TABLE)
    assert [chosen.pick(rows, 512, 256) for rows in (1, 19, 20, 32, 79, 80, 9999)] == [
        "triton",
        "triton",
        "cutlass",
        "cutlass",
        "cutlass",
        "triton",
        "triton",
    ]


def test_a_shape_measured_with_few_rows_decides_for_twice_as_many_at_most() -> None:
    """An interrupted tuner leaves such rows; with many rows the next shape decides."""
    chosen = ByShape(INT8.kind, INT8_ROWS, {**TABLE, "N=1024,K=256": {"4": "awkward"}})
    assert [chosen.pick(rows, 1024, 256) for rows in (1, 8, 9, 32)] == [
        "awkward",
        "awkward",
        "triton",
        "cutlass",
    ]


def test_block_fp8_with_few_measured_rows_leaves_many_to_the_rule() -> None:
    chosen = Providers("auto", {"N=512,K=512": {"1": "triton"}})
    for name in chosen._all:
        chosen._all[name] = SimpleNamespace(name=name, missing=lambda: "", fits=lambda *shape: True)
    many = provider_choice.UNMEASURED_MANY_ROWS[0]
    assert many != "triton"
    assert [chosen.pick(rows, 512, 512).name for rows in (1, 2, 4096)] == ["triton", "triton", many]


@pytest.mark.parametrize(("kind", "rule"), [(INT8.kind, INT8_ROWS), (AWQ.kind, AWQ_ROWS)])
def test_a_card_without_a_table_goes_by_rows(
    kind: str, rule: provider_choice.RowRule, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The H200's table is not used, whatever the shape."""
    monkeypatch.setattr(tuned, "device_name", lambda: "NVIDIA_H100")
    assert provider_choice.measured_cards(kind) == [CARD] and not provider_choice.measured(
        kind, "NVIDIA H100"
    )
    pick = picks(kind)
    for columns, depth in ((2048, 10944), (21888, 2048), (512, 512)):
        assert [
            pick(rows, columns, depth) for rows in (1, rule.threshold - 1, rule.threshold, 1 << 14)
        ] == [rule.small, rule.small, rule.large, rule.large]


@pytest.mark.parametrize("wanted", ["triton", "cutlass"])
def test_a_name_overrules_the_table_for_int8(wanted: str, card: None) -> None:
    assert {picks(INT8.kind, wanted=wanted)(rows, 2048, 2048) for rows in (1, 1024)} == {wanted}


@pytest.mark.parametrize("wanted", ["triton", "cublas"])
def test_a_name_overrules_the_table_for_awq(wanted: str, card: None) -> None:
    assert {picks(AWQ.kind, wanted=wanted)(rows, 2048, 2048) for rows in (1, 1024)} == {wanted}


def test_cutlass_gets_no_shape_that_it_does_not_support(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"N=2048,K=2048": {"1": "cutlass"}}
    multiply = int8_cuda.Int8Gemm("auto", table)
    asked = {
        (1, 2048, 2048): "cutlass",
        (0, 2048, 2048): "triton",
        (1, 2044, 2048): "triton",
        (1, 2048, 2040): "triton",
    }
    assert {shape: multiply.pick(*shape, torch.bfloat16) for shape in asked} == asked
    assert multiply.pick(1, 2048, 2048, torch.float32) == "triton"

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(libraries.importlib, "import_module", missing)
    assert int8_cuda.Int8Gemm("auto", table).pick(1, 2048, 2048, torch.bfloat16) == "triton"
