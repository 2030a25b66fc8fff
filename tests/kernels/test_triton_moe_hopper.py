"""Routed experts of large steps on Hopper against float32; their kernel also compiles without such
a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.moe import (
    experts as moe_experts,
    reference as moe,
)
from tests.support import uninterpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCRIPT = """
from tests.support.compiled import build, tile
from glowplug.kernels.moe import gemm_hopper as hopper

kinds = dict(x="*bf16", out="*bf16", x_at=tile(64, hopper.DEPTH),
             w_at=tile(hopper.COLUMNS // 2, hopper.DEPTH),
             **dict.fromkeys(("sorted_pairs", "expert_of_block", "num_padded"), "*i32"))
for parts, (ring, multiplying, fetching) in hopper.PIPELINES.items():
    for up, kept in ((True, 8), (False, 8), (False, 7)):
        constants = dict(UP=up, GATHER=up, TOPK=8, KEPT=kept, WARPGROUPS=parts,
                         COLUMNS=hopper.COLUMNS,
                         DEPTH=hopper.DEPTH, STAGES=ring, LEAD=1,
                         MULTIPLYING=multiplying, FETCHING=fetching, DEPENDENT=True)
        kinds["weights"] = "*bf16" if up else "*fp32"
        build(hopper._grouped_hopper, kinds, constants, ("columns", "depth"), num_warps=4)
"""


@pytest.mark.slow
def test_it_compiles_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == ["_grouped_hopper"] * 6


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_shared_experts_are_computed_as_one(shared: int) -> None:
    generator = torch.Generator().manual_seed(shared)
    x, w13, w2 = (
        torch.randn(shape, generator=generator).to(DEVICE)
        for shape in ((5, 48), (shared, 2 * 24, 48), (shared, 48, 24))
    )
    rows = torch.full((5, 3, 48), float("nan"), device=DEVICE)
    moe_experts.fused_shared_mlp(x, w13, w2, rows[:, 1])
    wanted = sum(
        silu_and_mul(x @ first.t()) @ second.t() for first, second in zip(w13, w2, strict=True)
    )
    torch.testing.assert_close(rows[:, 1], wanted, atol=1e-4, rtol=1e-4)
    assert rows[:, ::2].isnan().all()


def draw(
    tokens: int,
    k: int,
    experts: int,
    hidden: int,
    inter: int,
    skew: float,
    absent: float,
    shared: int,
) -> list[Tensor]:
    """Return inputs in which the ``shared`` last experts are every token's last, with weight 1, and
    the others are distributed by ``skew``.
    """
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    routed = experts - shared

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=DEVICE)

    ids = (random(tokens, routed) + skew * random(routed)).topk(k - shared, 1).indices.int()
    weights = random(tokens, k)
    ids[random(*ids.shape) < absent] = -1
    last = torch.arange(routed, experts, dtype=torch.int32, device=DEVICE).expand(tokens, -1)
    weights[:, k - shared :] = 1.0
    weights[:, : k - shared][ids < 0] = float("nan")
    x, w13, w2 = (
        torch.randn(shape, generator=generator, device=DEVICE).mul_(gain).to(torch.bfloat16)
        for shape, gain in (
            ((tokens, hidden), 1.0),
            ((experts, 2 * inter, hidden), 2 * hidden**-0.5),
            ((experts, hidden, inter), inter**-0.5),
        )
    )
    return [x, w13, w2, torch.cat([ids, last], 1), weights]


@pytest.mark.gpu
@pytest.mark.parametrize("block_m, lead", [(128, 2), (192, 1)])
@pytest.mark.parametrize(
    "tokens, k, experts, hidden, inter, shared",
    [
        (1, 8, 66, 2048, 1408, 2),
        (70, 6, 64, 2048, 1408, 0),
        (1030, 8, 66, 2048, 1408, 2),
        (4099, 8, 66, 2048, 1408, 2),
        (700, 5, 9, 320, 192, 1),
        (3000, 3, 5, 64, 64, 0),
        (257, 2, 2, 128, 448, 2),
    ],
)
def test_against_float32(
    tokens: int, k: int, experts: int, hidden: int, inter: int, shared: int, block_m: int, lead: int
) -> None:
    for shared_dense in (0, 1):
        for skew, absent in ((0.0, 0.0), (0.8, 0.3)):
            given = draw(tokens, k, experts, hidden, inter, skew, absent, shared)
            product = {
                "way": "hopper",
                "block_m": block_m,
                "group": 8,
                "lead": lead,
                "apart": shared_dense,
            }
            config = {"up": product, "down": product}
            poison = torch.full(
                (tokens * k * max(hidden, inter) * 4,),
                float("nan"),
                dtype=torch.bfloat16,
                device=DEVICE,
            )
            del poison
            found = moe_experts.experts(*given, config, shared)
            x, w13, w2, ids, weights = given
            wanted = moe.experts_reference(
                x.float(), w13.float().mT, w2.float().mT, ids, weights, silu_and_mul
            )
            error = (
                found.float() - wanted
            ).square().mean().sqrt() / wanted.square().mean().sqrt().clamp(min=1e-9)
            assert error < 1e-2
            assert torch.equal(found, moe_experts.experts(*given, config, shared)), (
                "repeats bit by bit"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("block_m, lead", [(128, 2), (192, 1)])
def test_replayed_with_other_inputs(block_m: int, lead: int) -> None:
    product = {"way": "hopper", "block_m": block_m, "group": 8, "lead": lead, "apart": 1}
    config = {"up": product, "down": product}
    given, other = (draw(1030, 8, 66, 512, 384, skew, 0.1, 2) for skew in (0.0, 0.8))
    moe_experts.experts(*given, config, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = moe_experts.experts(*given, config, 2)
    for inputs in ([tensor.clone() for tensor in given], other):
        for static, value in zip(given, inputs, strict=True):
            static.copy_(value)
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, moe_experts.experts(*given, config, 2))
