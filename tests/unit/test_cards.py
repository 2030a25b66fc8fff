"""Kernels and libraries are chosen for the GPU in use, because a plan may have been made for
another machine.
"""

from __future__ import annotations

import pytest
import torch

from glowplug.core.errors import GlowplugError
from glowplug.kernels.launch import cards


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)


@pytest.mark.parametrize(
    ("card", "tiles", "unfit"),
    [
        ((9, 0), True, ""),
        ((10, 0), True, "SM100"),
        ((8, 0), False, "SM80"),
        ((12, 0), False, "SM120"),
        ((7, 5), False, "SM75"),
    ],
    indirect=["card"],
)
def test_compute_capability_decides_on_tiles_and_libraries(
    card: None, tiles: bool, unfit: str
) -> None:
    pytest.importorskip("triton")
    assert cards.tiles_run_on("cuda:0") is tiles and not cards.tiles_run_on("cpu")
    assert unfit in cards.unfit_for_libraries() and bool(cards.unfit_for_libraries()) == bool(unfit)


@pytest.mark.parametrize("card", [(10, 0)], indirect=True)
def test_libraries_for_hopper_do_not_run_on_another_card(card: None) -> None:
    pytest.importorskip("triton")
    from glowplug.plugins.quantization.block_fp8.cutlass import CutlassExperts
    from glowplug.plugins.quantization.block_fp8.gemm_providers import Providers
    from glowplug.plugins.quantization.block_fp8.grouped import Grouped
    from glowplug.plugins.quantization.block_fp8.masked import Masked
    from glowplug.plugins.quantization.int8.cuda import Int8Gemm

    table = {"N=512,K=512": {"64": "cutlass"}}
    chosen = Providers("auto", table)
    assert {
        chosen.pick(rows, columns, 512).name for rows in (1, 64, 4096) for columns in (512, 768)
    } == {"triton"}
    with pytest.raises(GlowplugError, match="called on SM90, this card is SM100"):
        Providers("cublas", table)
    assert not Grouped("auto").pays(1 << 20, 8, 8)
    for asked in (
        lambda: Grouped("deep_gemm"),
        Masked,
        CutlassExperts,
        lambda: Int8Gemm("cutlass"),
    ):
        with pytest.raises(
            GlowplugError, match="is called on SM90, this card is SM100; leave it out"
        ):
            asked()
