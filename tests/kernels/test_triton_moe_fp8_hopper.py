"""Routed experts of large steps in block FP8 on Hopper, and that their kernel compiles where no such card is."""
from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests import uninterpreted
from tests.kernels.test_triton_moe_gemm_fp8 import DTYPE, TOLERANCE, Case

SCRIPT = """
from tests.compiled import build, tile
from glowplug.kernels.triton import moe_gemm_fp8_hopper as hopper
from triton.experimental.gluon import language as gl

tiles = tile(hopper.UNIT, hopper.DEPTH, gl.float8e4nv)
kinds = dict(x="*fp8e4nv", x_at=tiles, w_at=tiles, out="*bf16",
             **dict.fromkeys(("x_scales", "w_scales", "weights"), "*fp32"),
             **dict.fromkeys(("sorted_pairs", "expert_of_block", "num_padded"), "*i32"))
for parts, (ring, multiplying, fetching) in hopper.RINGS.items():
    for gather in (True, False):
        for up, topk in ((True, 9), (False, 1)):
            constants = dict(UP=up, GATHER=gather, TOPK=topk, PARTS=parts, COLUMNS=hopper.COLUMNS, DEPTH=hopper.DEPTH,
                             RING=ring, MULTIPLYING=multiplying, FETCHING=fetching, DEPENDENT=True)
            build(hopper._grouped_fp8_hopper, kinds, constants, ("columns", "depth"), num_warps=4)
"""
CONFIGS: tuple[dict[str, Any], ...] = (
    {"BLOCK_M": 192, "GROUP": 8, "GATHER": 1}, {"BLOCK_M": 128, "GROUP": 1, "GATHER": 1})


@pytest.mark.slow
def test_it_compiles_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == ["_grouped_fp8_hopper"] * 8


def case_of(tokens: int, per_token: int, experts: int, hidden: int, inter: int, skewed: bool) -> Case:
    """``skewed``: most tokens want the first experts, some of theirs are elsewhere, and the last gets nothing."""
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


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=["192", "128"])
@pytest.mark.parametrize("tokens, per_token, experts, hidden, inter", [
    (1, 1, 2, 128, 128), (63, 2, 3, 256, 128), (64, 3, 4, 640, 256), (193, 2, 2, 128, 384), (700, 4, 9, 896, 640),
    (1500, 3, 5, 7168, 256), (4099, 5, 33, 512, 2048)])
@pytest.mark.parametrize("skewed", [False, True])
def test_against_float32(tokens: int, per_token: int, experts: int, hidden: int, inter: int, skewed: bool,
                         config: dict[str, Any]) -> None:
    case = case_of(tokens, min(per_token, experts - 1), experts, hidden, inter, skewed)
    poison = torch.full((tokens * per_token * max(hidden, 2 * inter) * 2,), float("nan"), dtype=DTYPE, device="cuda")
    del poison
    found = case.found(config)
    wanted = case.wanted()
    assert torch.isfinite(found).all()
    assert (found.float() - wanted).norm() <= TOLERANCE * wanted.norm()
    for _ in range(3):
        assert torch.equal(found, case.found(config)), "repeats bit by bit"


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=["192", "128"])
def test_replayed_with_other_inputs(config: dict[str, Any]) -> None:
    case, other = (case_of(1030, 4, 9, 512, 384, skewed) for skewed in (False, True))
    case.found(config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.found(config)
    for inputs in (case_of(1030, 4, 9, 512, 384, False), other):
        for name in ("x", "ids", "weights", "w13", "scales13", "w2", "scales2"):
            getattr(case, name).copy_(getattr(inputs, name))
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, inputs.found(config))


@pytest.mark.gpu
def test_nothing_to_do() -> None:
    case = Case(70, 2, 4, 256, 128, seed=1)
    case.ids.fill_(-1)
    assert not case.found(CONFIGS[0]).any()


@pytest.mark.gpu
def test_the_same_as_the_kernel_for_any_load() -> None:
    """Of one product by the same numbers: sums in float32 of groups that are summed by the tensor cores."""
    case = Case(500, 3, 6, 1024, 256, seed=3)
    each = {"BLOCK_N": 128, "SWAP": False, "TMA": True, "num_warps": 8, "num_stages": 3}
    other = case.found({"BLOCK_M": 128, "FUSE": False, "first": each, "second": each})
    found = case.found(CONFIGS[0])
    assert (found.float() - other.float()).norm() <= 5e-3 * other.float().norm()
