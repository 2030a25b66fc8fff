"""Sorted experts around a library's grouped GEMM, which is simulated here and gets either the ends
of each expert's rows or each row's expert. Without a GPU the kernels are interpreted.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.core.errors import GlowplugError  # noqa: E402
from glowplug.kernels.elementwise.activation_reference import silu_and_mul  # noqa: E402
from glowplug.kernels.formats import fp8, fp8_triton as fp8_quant  # noqa: E402
from glowplug.plugins.quantization.block_fp8 import grouped as block_fp8_grouped  # noqa: E402
from glowplug.plugins.quantization.block_fp8.grouped import Grouped  # noqa: E402
from glowplug.plugins.quantization.shared import libraries  # noqa: E402

EXPERTS, HIDDEN, INTER, WIDTH, TILE = 5, 256, 128, 3, 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_fp8_grouped, "DEEP_GEMM_TILE", TILE)


class Library:
    """A grouped GEMM in float32 that writes NaN into every row outside its layout; with ``fails``,
    it raises that for a layout of ends.
    """

    def __init__(self, fails: str = "") -> None:
        self.fails, self.told = fails, []  # type: ignore[var-annotated]

    def __call__(
        self,
        x: tuple[Tensor, Tensor],
        weight: tuple[Tensor, Tensor],
        out: Tensor,
        layout: Tensor,
        use_psum_layout: bool = False,
        expected_m_for_psum_layout: int | None = None,
    ) -> None:
        self.told.append("ends" if use_psum_layout else "rows")
        if use_psum_layout and self.fails:
            raise RuntimeError(self.fails)
        out.fill_(torch.nan)
        values = x[0].float() * x[1].repeat_interleave(128, 1)
        for expert, (stored, scales) in enumerate(zip(*weight, strict=True)):
            rows = (
                _between(layout, expert)
                if use_psum_layout
                else (layout == expert).nonzero().flatten()
            )
            out[rows] = (
                values[rows] @ fp8.dequantize_weight(stored, scales, torch.float32).t()
            ).to(out.dtype)


def _between(ends: Tensor, expert: int) -> Tensor:
    before = 0 if expert == 0 else -(-int(ends[expert - 1]) // TILE) * TILE
    return torch.arange(before, int(ends[expert]), device=ends.device)


def grouped(by_ends: bool, library: Library) -> Grouped:
    made = Grouped("triton")
    made._multiply, made._by_ends = library, by_ends
    return made


def blocks(*shape: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    parts = [
        fp8.quantize_weight(torch.randn(shape[1:], generator=generator) / shape[2] ** 0.5)
        for _ in range(shape[0])
    ]
    return tuple(torch.stack(part).to(DEVICE) for part in zip(*parts))  # type: ignore[return-value]


def wanted_of(
    x: Tensor, ids: Tensor, weights: Tensor, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
) -> Tensor:
    out = torch.zeros_like(x)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, slot])
        up, down = (
            fp8.dequantize_weight(w[0][expert], w[1][expert], torch.float32) for w in (w13, w2)
        )
        inner = fp8.fake_quantize_tokens(
            silu_and_mul((x[token : token + 1] @ up.t()).bfloat16().float())
        )
        out[token] += weights[token, slot] * (inner @ down.t())[0]
    return out


@pytest.mark.parametrize(("tokens", "used"), [(9, 5), (60, 2)])
@pytest.mark.parametrize("by_ends", [True, False])
def test_against_a_loop(tokens: int, used: int, by_ends: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    w13, w2 = (
        blocks(EXPERTS, 2 * INTER, HIDDEN, generator=generator),
        blocks(EXPERTS, HIDDEN, INTER, generator=generator),
    )
    ids = torch.randint(
        EXPERTS - used, EXPERTS, (tokens, WIDTH), generator=generator, dtype=torch.int32
    )
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    weights = torch.rand(tokens, WIDTH, generator=generator).to(DEVICE)
    x, scales = fp8_quant.quantize(torch.randn(tokens, HIDDEN, generator=generator).to(DEVICE))
    library = Library()
    found: Any = grouped(by_ends, library).experts(
        x, scales, *w13, *w2, ids.to(DEVICE), weights, torch.float32
    )
    assert library.told == ["ends" if by_ends else "rows"] * 2
    values = x.float() * scales.repeat_interleave(128, 1)
    wanted = wanted_of(values, ids.to(DEVICE), weights, w13, w2)
    assert torch.isfinite(found).all()
    assert (found - wanted).norm() <= (1e-2 if DEVICE == "cuda" else 0.12) * wanted.norm()


def run_twice(library: Library) -> None:
    generator = torch.Generator().manual_seed(0)
    w13, w2 = (
        blocks(EXPERTS, 2 * INTER, HIDDEN, generator=generator),
        blocks(EXPERTS, HIDDEN, INTER, generator=generator),
    )
    x, scales = fp8_quant.quantize(torch.randn(4, HIDDEN, generator=generator).to(DEVICE))
    ids = torch.tensor(
        [[0, 1, 2], [4, 3, 2], [1, 1, 1], [-1, 0, 4]], dtype=torch.int32, device=DEVICE
    )
    made = grouped(True, library)
    for _ in range(2):
        made.experts(x, scales, *w13, *w2, ids, torch.rand(4, WIDTH, device=DEVICE), torch.float32)


def test_a_build_without_ends_gets_rows_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    library = Library(fails="Assertion error (csrc/apis/gemm.hpp:194): not use_psum_layout")
    run_twice(library)
    assert library.told == ["ends", "rows", "rows", "rows", "rows"]
    assert [record.getMessage().partition(": Assertion")[2] != "" for record in caplog.records] == [
        True
    ], "said once"


def test_any_other_failure_is_raised() -> None:
    library = Library(fails="CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_twice(library)
    assert library.told == ["ends"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'deep_gemm'", name="deep_gemm"), 0),
        (RuntimeError("libnvrtc.so.13"), 1),
        (ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi"), 1),
    ],
)
def test_a_library_that_is_installed_and_cannot_be_used(
    error: Exception, said: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(libraries.importlib, "import_module", fail)
    assert not Grouped("auto").pays(10_000, 8, 8)
    assert [str(error) in record.getMessage() for record in caplog.records] == [True] * said
    with pytest.raises(GlowplugError, match=str(error)):
        Grouped("deep_gemm")


@pytest.mark.parametrize(("multiply", "by_ends"), [(Library(), True), (max, False)])
def test_a_library_without_a_signature_gets_rows(
    multiply: Any, by_ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled functions are like this: they have no signature."""
    monkeypatch.setitem(
        sys.modules, "deep_gemm", SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=multiply)
    )
    made = Grouped("deep_gemm")
    assert made.pays(1, 1, 256) and made._by_ends is by_ends
