"""One row times a weight that programs hold, against the torch reference; ragged sizes, split
depth.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.kernels.formats import fp8
from glowplug.kernels.gemm import (
    few_rows_fp8 as skinny_gemm_fp8,
    fp8 as fp8_gemm,
    tuning_fp8 as fp8_tuning,
)
from glowplug.kernels.launch import tuned_tables as tuned
from tests.kernels.test_triton_fp8_gemm import DTYPE, close, operands

TILED = {
    "BLOCK_M": 16,
    "BLOCK_N": 64,
    "SPLIT_K": 1,
    "SWAP": True,
    "TMA": False,
    "num_warps": 4,
    "num_stages": 3,
}


def held(rows: int, splits: int = 1) -> dict[str, int]:
    return {"HELD": rows, "SPLIT_K": splits, "num_warps": 4}


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("columns, depth", [(128, 384), (130, 896), (72, 456)])
@pytest.mark.parametrize("rows", [2, 4, 16])
def test_products(rows: int, columns: int, depth: int, splits: int) -> None:
    x, x_scales, weight, w_scales = operands(1, columns, depth, seed=rows + splits)
    found = fp8_gemm.gemm(x, x_scales, weight, w_scales, DTYPE, held(rows, splits))
    close(found, fp8.block_scaled_mm(x, x_scales, weight, w_scales))


def test_a_depth_of_fewer_groups_than_parts() -> None:
    x, x_scales, weight, w_scales = operands(1, 64, 128, seed=3)
    close(
        fp8_gemm.gemm(x, x_scales, weight, w_scales, DTYPE, held(8, 2)),
        fp8.block_scaled_mm(x, x_scales, weight, w_scales),
    )


def test_scales_of_single_rows_use_the_other_kernel() -> None:
    x, x_scales, weight, w_scales = operands(1, 130, 256, seed=4)
    by_row = w_scales.repeat_interleave(128, 0)[:130].contiguous()
    close(
        fp8_gemm.gemm(x, x_scales, weight, by_row, DTYPE, held(16)),
        fp8.block_scaled_mm(x, x_scales, weight, w_scales),
    )


def test_a_table_is_read_for_rows_that_its_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {1: held(4), 2: {**TILED, "num_warps": 8}, 32: TILED}
    monkeypatch.setattr(tuned, "table", lambda name: table)
    chosen = {
        rows: fp8_gemm.fp8_gemm_config.__wrapped__(rows, 640, 512) for rows in (1, 2, 4, 17, 40, 65)
    }
    assert chosen == {
        1: table[1],
        2: table[2],
        4: table[2],
        17: TILED,
        40: TILED,
        65: fp8_gemm.fp8_gemm_rule(65, 640, 512),
    }
    del table[2], table[32]
    assert fp8_gemm.fp8_gemm_config.__wrapped__(2, 640, 512) == fp8_gemm.fp8_gemm_rule(2, 640, 512)
    assert (
        skinny_gemm_fp8.held_rows_fit(1, 8)
        and not skinny_gemm_fp8.held_rows_fit(2, 8)
        and not skinny_gemm_fp8.held_rows_fit(1, 24)
    )


@pytest.mark.parametrize("depth", [1536, 7168, 16384, 18432])
def test_candidates_fill_registers_and_waste_few(depth: int) -> None:
    found = fp8_tuning.held_candidates(depth)
    assert {config["SPLIT_K"] for config in found} >= ({3, 9} if depth == 18432 else {1, 2})
    for config in found:
        room = skinny_gemm_fp8.groups_of(depth, config["SPLIT_K"]) * config["SPLIT_K"] * 128
        a_thread = config["HELD"] * room / config["SPLIT_K"] / (32 * config["num_warps"])
        assert (
            skinny_gemm_fp8.held_rows_fit(1, config["HELD"])
            and depth <= room <= depth * 4 / 3
            and 64 <= a_thread <= 512
        )
    few, many = fp8_tuning.gemm_candidates(1, 640, depth), fp8_tuning.gemm_candidates(2, 640, depth)
    assert [config for config in few if "HELD" in config] == found and not any(
        "HELD" in config for config in many
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "columns, depth", [(2112, 7168), (24576, 1536), (7168, 16384), (36864, 7168), (7168, 18432)]
)
def test_published_sizes(columns: int, depth: int) -> None:
    for config in ({**held(16, 9), "num_warps": 8}, fp8_gemm.fp8_gemm_config(1, columns, depth)):
        x, x_scales, weight, w_scales = operands(1, columns, depth, seed=columns)
        close(
            fp8_gemm.gemm(x, x_scales, weight, w_scales, torch.bfloat16, config),
            fp8.block_scaled_mm(x, x_scales, weight, w_scales),
        )
