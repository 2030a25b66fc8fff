"""Routed experts of large steps in block FP8 on Hopper; their kernel also compiles without such
a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.formats import fp8, fp8_triton as fp8_quant
from glowplug.kernels.moe.align import align
from glowplug.kernels.moe.fp8 import gemm_hopper as hopper, tiles as moe_fp8_tiles
from glowplug.kernels.moe.sort import gather_rows
from tests.kernels.test_triton_moe_gemm_fp8 import DTYPE, Case
from tests.support import uninterpreted

CLOSE = 3e-3  #: of results in bfloat16
SCRIPT = """
from tests.support.compiled import build, tile
from glowplug.kernels.moe.fp8 import gemm_hopper as hopper
from triton.experimental.gluon import language as gl

tiles = tile(hopper.UNIT, hopper.DEPTH, gl.float8e4nv)
kinds = dict(x_at=tiles, w_at=tiles, out="*bf16",
             **dict.fromkeys(("x_scales", "w_scales", "weights"), "*fp32"),
             **dict.fromkeys(("sorted_pairs", "expert_of_block", "num_padded"), "*i32"))
for up in (True, False):
    constants = dict(UP=up, WARPGROUPS=hopper.WARPGROUPS, COLUMNS=hopper.COLUMNS,
                     DEPTH=hopper.DEPTH,
                     STAGES=hopper.STAGES,
                     MULTIPLYING=hopper.MULTIPLYING, FETCHING=hopper.FETCHING, DEPENDENT=True)
    build(hopper._grouped_fp8_hopper, kinds, constants, ("columns", "depth", "x_stride"),
          num_warps=4)
"""


@pytest.mark.slow
def test_it_compiles_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == ["_grouped_fp8_hopper"] * 2


def case_of(
    tokens: int, per_token: int, experts: int, hidden: int, inter: int, skewed: bool
) -> Case:
    """Return a case; with ``skewed`` most tokens choose the first experts, some of theirs are
    elsewhere, and the last expert gets no row.
    """
    case = Case(tokens, per_token, experts, hidden, inter, seed=tokens + experts)
    if skewed:
        generator = torch.Generator(case.ids.device).manual_seed(tokens)
        draw = torch.rand(tokens, experts, generator=generator, device=case.ids.device)
        draw += torch.linspace(0.8, 0.0, experts, device=draw.device)
        draw[:, -1] = -1.0
        case.ids = draw.topk(per_token, 1).indices.int()
        case.ids[torch.rand(case.ids.shape, generator=generator, device=draw.device) < 0.2] = -1
        case.weights[case.ids < 0] = float("nan")
    return case


def full(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales.repeat_interleave(128, 1)[:, : values.shape[1]]


def off(found: Tensor, wanted: Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.float() - wanted).norm() / wanted.norm().clamp(min=1e-20))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize(
    "tokens, per_token, experts, hidden, inter",
    [
        (1, 1, 2, 128, 128),
        (63, 2, 3, 256, 128),
        (64, 3, 4, 640, 256),
        (193, 2, 2, 128, 384),
        (700, 4, 9, 896, 640),
        (1500, 3, 5, 7168, 256),
        (4099, 5, 33, 512, 2048),
    ],
)
@pytest.mark.parametrize("skewed", [False, True])
def test_each_product_against_float32(
    tokens: int, per_token: int, experts: int, hidden: int, inter: int, skewed: bool, group: int
) -> None:
    case = case_of(tokens, min(per_token, experts - 1), experts, hidden, inter, skewed)
    pairs, config = case.ids.numel(), {"GROUP": group}
    order = align(case.ids, experts, moe_fp8_tiles.HOPPER_ROWS)
    rows, scales, place = gather_rows(*case.quantized(), order, case.ids)
    there = case.ids.flatten() >= 0
    poison = torch.full(
        (len(rows) * max(hidden, 2 * inter) * 2,), float("nan"), dtype=DTYPE, device="cuda"
    )
    del poison
    hidden_rows = hopper.gated(rows, scales, case.w13, case.scales13, order, pairs, DTYPE, config)
    read = full(*fp8_quant.quantize(hidden_rows))
    found = hopper.product(
        *fp8_quant.quantize(hidden_rows), case.w2, case.scales2, order, case.weights, DTYPE, config
    )
    where = place.long()
    for expert in range(experts):
        mine = ((case.ids.flatten() == expert) & there).nonzero()[:, 0]
        if not len(mine):
            continue
        w13 = fp8.dequantize_weight(case.w13[expert], case.scales13[expert], torch.float32)
        w2 = fp8.dequantize_weight(case.w2[expert], case.scales2[expert], torch.float32)
        gate, up = (full(rows, scales)[where[mine]] @ w13.t()).split(inter, 1)
        assert off(hidden_rows[where[mine]], torch.nn.functional.silu(gate) * up) <= CLOSE
        wanted = (read[where[mine]] @ w2.t()) * case.weights.flatten()[mine, None]
        assert off(found[mine], wanted) <= CLOSE
    again = hopper.gated(rows, scales, case.w13, case.scales13, order, pairs, DTYPE, config)
    assert torch.equal(hidden_rows[where[there]], again[where[there]]), "repeats bit by bit"


@pytest.mark.gpu
def test_nothing_to_do() -> None:
    case = Case(70, 2, 4, 256, 128, seed=1)
    case.ids.fill_(-1)
    assert not case.found(moe_fp8_tiles.hopper(1)).any()
