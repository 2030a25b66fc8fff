"""The tuners of FP8 GEMMs: the tables of a model, both kinds of measurement, and the record of the
faster provider.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import ExpertsShape, LinearShape
from glowplug.core.protocols.tuning import LayerShapes, TuneTable
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.kernels.gemm import tuning_fp8 as fp8_tuning
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.moe import tuning as moe_tuning
from glowplug.plugins.quantization.shared.provider_tables import versions_here
from glowplug.plugins.quantization.tuning import dense_experts, fp8 as fp8_tuners

ROWS = (8, 128)

VERSIONS = {"triton": "3.6.0", "torch": "2.11.0"}


def linear(name: str, outputs: tuple[int, ...], inputs: int) -> LinearShape:
    return LinearShape(
        name, (name,), outputs, inputs, (0,) * len(outputs), 0, ((sum(outputs), inputs),)
    )


def experts(prefix: str, inter: int) -> ExpertsShape:
    return ExpertsShape(prefix, 8, 0, 256, inter, 0, inter, 8, fused_shared=1)


SHAPES = LayerShapes(
    (linear("a", (1536, 576), 7168), linear("b", (1536, 576), 7168), linear("head", (512,), 7168)),
    (experts("dense", 192), experts("kept", 192)),
    frozenset({"a", "b", "kept"}),
    2,
)


class Quick:
    """A library that is always available and supports many rows."""

    name, pads = "quick", True

    def missing(self) -> str:
        return ""

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return rows >= 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the tables; times come from a formula, so no device is needed."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(fp8_tuners, "provider_path", lambda: tmp_path / "providers.json")

    def tune(
        columns: int, depth: int, path: Path, *, rows: Sequence[int], **more: Any
    ) -> dict[int, Any]:
        found = {number: {"BLOCK_M": 16} for number in rows}
        path.write_text(
            json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **found})
        )
        return found

    monkeypatch.setattr(fp8_tuning, "tune_gemm", tune)
    return tmp_path


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> fp8_tuners.Fp8GemmTuner:
    found = fp8_tuners.Fp8GemmTuner(bare_plan())
    found._libraries = [Quick()]  # type: ignore[list-item]
    monkeypatch.setattr(fp8_tuners, "Operands", lambda *shape: _NoOperands())
    monkeypatch.setattr(fp8_tuners, "microseconds", lambda calls: 4.0 if calls else 10.0)
    return found


class _NoOperands:
    def calls(self, product: Any, pads: bool) -> list[object]:
        return [product] if pads else []


def test_tables_fill_and_the_next_run_goes_on(tuner: fp8_tuners.Fp8GemmTuner, folder: Path) -> None:
    (table,) = tuner.tables(SHAPES, ROWS)
    assert (table.label, table.missing) == ("N=2112,K=7168", ROWS)
    log: list[str] = []
    tuner.tune(table, 60.0, log.append)
    assert "128 rows: quick; triton 10.0 us, quick 4.0 us" in log
    found = json.loads((folder / "providers.json").read_text())
    assert found["fastest"] == {"N=2112,K=7168": {"8": "triton", "128": "quick"}}
    assert found["versions"] == versions_here(())
    assert tuner.tables(SHAPES, (*ROWS, 512))[0].missing == (512,)
    (folder / "providers.json").write_text("{}")
    assert tuner.tables(SHAPES, ROWS)[0].missing == ROWS, "both tables count"


def test_no_time_notes_no_provider(tuner: fp8_tuners.Fp8GemmTuner, folder: Path) -> None:
    log: list[str] = []
    tuner.tune(
        TuneTable("N=2112,K=7168", folder / "t.json", (1, 8), (), (2112, 7168)), -1.0, log.append
    )
    assert log[-1] == "out of time before measuring the libraries at 1 rows"
    assert not (folder / "providers.json").exists()


def test_a_library_that_fails_is_left_out(
    tuner: fp8_tuners.Fp8GemmTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(calls: Sequence[Callable[[], object]]) -> float:
        if calls:
            raise RuntimeError("no kernel image")
        return 10.0

    monkeypatch.setattr(fp8_tuners, "microseconds", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert tuner.provider_times(64, 256, 512, {}) == {"triton": 10.0}


def test_operands_have_whole_blocks_where_a_library_wants_them() -> None:
    seen: list[tuple[int, ...]] = []

    def product(x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, *more: Any) -> None:
        seen.append(tuple(weight.shape))

    operands = fp8_tuners.Operands.__new__(fp8_tuners.Operands)
    operands.columns, operands.x, operands.x_scales = 130, torch.ones(1), torch.ones(1)
    operands.weights, operands.w_scales = [torch.ones(256, 128)] * 2, torch.ones(1)
    for pads in (False, True):
        for call in operands.calls(product, pads):
            call()
    assert seen == [(130, 128)] * 2 + [(256, 128)] * 2


def test_providers_of_several_products_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fp8_gemm.json"
    for problem, rows, name in (
        ("N=1,K=2", 64, "triton"),
        ("N=3,K=4", 8, "cublas"),
        ("N=1,K=2", 8, "deep_gemm"),
        ("N=1,K=2", 64, "cutlass"),
    ):
        fp8_tuners.note_provider(path, problem, rows, name, VERSIONS)
    assert json.loads(path.read_text()) == {
        "versions": VERSIONS,
        "fastest": {
            "N=1,K=2": {"8": "deep_gemm", "64": "cutlass"},
            "N=3,K=4": {"8": "cublas"},
        },
    }
    assert fp8_tuners.rows_done(path, "N=1,K=2", VERSIONS) == (8, 64)


def test_only_experts_over_dense_weights_are_moes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        moe_tuning,
        "tune_experts",
        lambda problem, shared, path, **more: asked.append(
            (problem.experts, problem.topk, problem.inter, shared, more["tokens"])
        ),
    )
    tuner = dense_experts.MoeTuner(bare_plan())
    (table,) = tuner.tables(SHAPES, ROWS)
    table.path.write_text('{"8": {}}')
    (table,) = tuner.tables(SHAPES, ROWS)
    tuner.tune(table, 1.0, print)
    assert asked == [(9, 3, 192, 1, (128,))]


def test_both_tuners_are_registered() -> None:
    names = [
        found.name
        for _, group in load_plugins(entry_points=False).call_each("tuners")
        for found in group
    ]
    assert {"moe", "fp8-gemm"} <= set(names)
