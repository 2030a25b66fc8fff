"""`glowplug tune fp8-gemm`: candidates that can run, tables that grow row by row, the faster provider noted."""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from glowplug.core.plugins import load_plugins
from glowplug.core.protocols import LinearShape
from glowplug.core.tuning import LayerShapes, TuneTable
from glowplug.kernels.triton import fp8_gemm, fp8_tuning
from glowplug.plugins.quantization import tune_fp8

PRODUCTS = ((2112, 7168), (24576, 1536), (7168, 2048), (576, 512))


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 65, 512, 4096])
@pytest.mark.parametrize("product", PRODUCTS)
def test_candidates_can_run_and_begin_with_the_rule(rows: int, product: tuple[int, int]) -> None:
    found = fp8_tuning.candidates(rows, *product)
    assert dict(found[0]) == dict(fp8_gemm.rule(rows, *product))
    assert 4 < len(found) < 70
    assert len({json.dumps(config, sort_keys=True) for config in found}) == len(found)
    for config in found:
        assert set(config) == set(found[0])
        assert config["BLOCK_N"] <= 128
        assert config["SPLIT_K"] == 1 or rows <= 64
        assert rows > 64 or config["BLOCK_M"] >= min(64, rows)


def test_the_fastest_of_those_that_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = SimpleNamespace(calls=lambda config: [config])
    configs = [{"us": us} for us in (5.0, 3.0, 9.0, 1.0)]
    measured: list[float] = []

    def timing(calls: Sequence[Any]) -> float:
        measured.append(calls[0]["us"])
        time.sleep(0.02)
        return float(calls[0]["us"])

    assert fp8_tuning.fastest(bench, configs, time.monotonic() + 60, timing) == (1.0, {"us": 1.0})
    assert measured == [5.0, 3.0, 9.0, 1.0]
    measured.clear()
    assert fp8_tuning.fastest(bench, configs, time.monotonic() - 1, timing)[0] == 5.0
    assert measured == [5.0]


def test_rows_are_added_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "t.json"
    for rows in (512, 8, 64):
        fp8_tuning.write_row(path, rows, {"BLOCK_M": rows})
    assert list(json.loads(path.read_text())) == ["8", "64", "512"]


def test_providers_of_several_products_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fp8_gemm.json"
    tune_fp8._note_provider(path, "N=1,K=2", 64, "triton")
    tune_fp8._note_provider(path, "N=3,K=4", 8, "cublas")
    tune_fp8._note_provider(path, "N=1,K=2", 8, "deep_gemm")
    tune_fp8._note_provider(path, "N=1,K=2", 64, "cutlass")
    assert json.loads(path.read_text()) == {"N=1,K=2": {"8": "deep_gemm", "64": "cutlass"}, "N=3,K=4": {"8": "cublas"}}


class Quick:
    """A library that is always there."""

    name, pads = "quick", True

    def missing(self) -> str:
        return ""

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return rows >= 64

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("timed by the test, never called")


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tune_fp8.Fp8GemmTuner:
    """Measurements come from a formula: no device."""
    monkeypatch.setattr(fp8_tuning.tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(tune_fp8, "provider_path", lambda: tmp_path / "fp8_gemm,device_name=cpu.json")
    monkeypatch.setattr(fp8_tuning, "compile_ahead", lambda wanted, workers: set())
    monkeypatch.setattr(fp8_tuning.Bench, "make", lambda rows, columns, depth: SimpleNamespace(
        x=None, x_scales=None, w_scales=None, padded=[torch.empty(2, 2)], calls=lambda config: [config]))
    monkeypatch.setattr(fp8_tuning, "fastest", lambda bench, configs, deadline: (10.0, configs[1]))
    monkeypatch.setattr(tune_fp8, "microseconds", lambda calls: 4.0)
    found = tune_fp8.Fp8GemmTuner(None)  # type: ignore[arg-type]
    found._libraries = [Quick()]
    return found


def linear(name: str, outputs: tuple[int, ...], inputs: int) -> LinearShape:
    return LinearShape(name, (name,), outputs, inputs, (0,) * len(outputs), 0, ((sum(outputs), inputs),))


def test_tables_of_quantized_products_fill_and_resume(tuner: tune_fp8.Fp8GemmTuner, tmp_path: Path) -> None:
    shapes = LayerShapes((linear("a", (1536, 576), 7168), linear("b", (1536, 576), 7168), linear("head", (512,), 7168)),
                         (), frozenset({"a", "b"}), 8)
    log: list[str] = []
    table, = tuner.tables(shapes, (8, 128))
    assert (table.label, table.missing) == ("N=2112,K=7168", (8, 128))
    tuner.tune(table, 60.0, log.append)
    again, = tuner.tables(shapes, (8, 128, 512))
    assert again.missing == (512,)
    providers = json.loads((tmp_path / "fp8_gemm,device_name=cpu.json").read_text())
    assert providers == {"N=2112,K=7168": {"8": "triton", "128": "quick"}}
    assert dict(json.loads(table.path.read_text())["8"]) == dict(fp8_tuning.candidates(8, 2112, 7168)[1])
    assert "128 rows: quick; triton 10.0 us, quick 4.0 us" in log
    (tmp_path / "fp8_gemm,device_name=cpu.json").write_text("{}")
    assert tuner.tables(shapes, (8, 128))[0].missing == (8, 128), "both tables count"


def test_no_time_measures_nothing_and_says_so(tuner: tune_fp8.Fp8GemmTuner, tmp_path: Path) -> None:
    log: list[str] = []
    tuner.tune(TuneTable("N=2112,K=7168", tmp_path / "t.json", (1, 8), (), (2112, 7168)), -1.0, log.append)
    assert log[-1] == "out of time; not measured: (1, 8)"
    assert not (tmp_path / "t.json").exists()


def test_a_library_that_fails_is_left_out(tuner: tune_fp8.Fp8GemmTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(calls: Sequence[Callable[[], object]]) -> float:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(tune_fp8, "microseconds", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench: Any = fp8_tuning.Bench.make(64, 256, 512)
    assert tuner._others(bench, 64, 256, 512) == {}


def test_both_tuners_are_registered() -> None:
    names = [tuner.name for _, found in load_plugins(entry_points=False).call_each("tuners") for tuner in found]
    assert {"moe", "fp8-gemm"} <= set(names)
