"""The tuners of int8 and AWQ: the tables of a model, the record of the faster provider, and that
the GEMM itself is timed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.core.protocols import LinearShape  # noqa: E402
from glowplug.core.protocols.tuning import LayerShapes  # noqa: E402
from glowplug.core.testing.harness.build import plan_for  # noqa: E402
from glowplug.kernels.formats import awq as layout  # noqa: E402
from glowplug.kernels.launch import tuned_tables as tuned  # noqa: E402
from glowplug.plugins.quantization.shared import provider_choice  # noqa: E402
from glowplug.plugins.quantization.tuning import narrow  # noqa: E402
from glowplug.plugins.quantization.tuning.narrow import AwqGemmTuner, Int8GemmTuner, NarrowTuner  # noqa: E402
from tests.support.narrow_checkpoints import AWQ, tiny_facts  # noqa: E402

TUNERS = [(Int8GemmTuner, "w8a8_int8", "int8_gemm"), (AwqGemmTuner, "awq", "awq_gemm")]


def linear(name: str, outputs: tuple[int, ...], inputs: int) -> LinearShape:
    return LinearShape(
        name, (name,), outputs, inputs, (0,) * len(outputs), 0, ((sum(outputs), inputs),)
    )


SHAPES = LayerShapes(
    (
        linear("a", (64, 32), 128),
        linear("b", (96,), 128),
        linear("c", (64,), 256),
        linear("head", (512,), 128),
    ),
    (),
    frozenset({"a", "b", "c"}),
    0,
)


def tuner_of(made: type[NarrowTuner], scheme: str) -> NarrowTuner:
    facts = tiny_facts("v2", quantization_config={**AWQ, "group_size": 64})
    plan: Any = SimpleNamespace(
        dtype="float32" if DEVICE == "cpu" else "bfloat16",
        facts=plan_for(facts).facts,
        choice=lambda slot: SimpleNamespace(name=scheme),
    )
    return made(plan, DEVICE)


@pytest.mark.parametrize(("made", "scheme", "kind"), TUNERS)
def test_tables_fill_and_the_next_run_goes_on(
    made: type[NarrowTuner], scheme: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(tuned, "device_name", lambda: "NVIDIA_H100")
    monkeypatch.setattr(narrow, "microseconds", lambda calls: float(calls))
    tuner, log = tuner_of(made, scheme), []
    monkeypatch.setattr(made, "calls", lambda self, rows, *shape: {"triton": rows, "other": 20})
    first, second = tuner.tables(SHAPES, (8, 128))
    assert [(table.label, table.missing) for table in (first, second)] == [
        ("N=96,K=128", (8, 128)),
        ("N=64,K=256", (8, 128)),
    ]
    tuner.tune(first, -1.0, log.append)
    assert log == ["out of time before measuring 8 rows"] and not first.path.exists()
    tuner.tune(first, 60.0, log.append)
    assert log[1:] == [
        "8 rows: triton; triton 8.0 us, other 20.0 us",
        "128 rows: other; triton 128.0 us, other 20.0 us",
    ]
    assert provider_choice.measured(kind, "NVIDIA H100") == {
        "N=96,K=128": {"8": "triton", "128": "other"}
    }
    assert json.loads(first.path.read_text()) and first.path == second.path
    assert [table.missing for table in tuner.tables(SHAPES, (8, 128, 512))] == [
        (512,),
        (8, 128, 512),
    ]
    chosen = provider_choice.ByShape(kind, provider_choice.INT8_ROWS)
    assert [chosen.pick(rows, 96, 128) for rows in (1, 67, 68, 4096)] == [
        "triton",
        "triton",
        "other",
        "other",
    ]
    assert tuner_of(made, "block_fp8").tables(SHAPES, ()) == [], "another scheme's layers"


@pytest.mark.parametrize("columns", [96, 90])
def test_the_gemm_in_int8_is_timed(columns: int) -> None:
    calls = tuner_of(Int8GemmTuner, "w8a8_int8").calls(3, columns, 128)
    assert set(calls) >= {"triton"} and all(len(each) >= 2 for each in calls.values())
    for each in calls.values():
        for call in each:
            x, x_scales, weight, scales, dtype, _ = call.args  # type: ignore[attr-defined]
            wanted = (x.double() * x_scales.double()[:, None]) @ (
                weight.double() * scales.double()[:, None]
            ).t()
            near(call(), wanted, dtype)


def test_the_gemm_in_awq_is_timed() -> None:
    calls = tuner_of(AwqGemmTuner, "awq").calls(3, 96, 128)
    assert set(calls) == {"triton", "cublas"}
    for each in calls.values():
        for call in each:
            x, packed, factors, group, _ = call.args  # type: ignore[attr-defined]
            assert group == 64
            scales, zeros = layout.unpack_factors(factors.cpu(), x.dtype)
            numbers = layout.unpack_blocks(packed.cpu(), 128).double()
            wide = [part.double().repeat_interleave(group, 0).t() for part in (scales, zeros)]
            near(call(), x.cpu().double() @ ((numbers - wide[1]) * wide[0]).t(), x.dtype)


def near(found: Any, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and tuple(found.shape) == tuple(wanted.shape)
    assert (found.cpu().double() - wanted.cpu()).norm() <= (
        1e-5 if dtype is torch.float32 else 1e-2
    ) * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("made", "scheme", "kind"), TUNERS)
def test_a_card_is_measured(
    made: type[NarrowTuner], scheme: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuner, log = tuner_of(made, scheme), []
    table = tuner.tables(SHAPES, (8, 1024))[0]
    tuner.tune(table, 60.0, log.append)
    assert tuner.tables(SHAPES, (8, 1024))[0].missing == (), log
