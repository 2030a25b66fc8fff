"""Routed experts in Triton against the torch reference, each method and tile. Interpreted without a
GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.moe import (
    experts as moe_experts,
    gemm as moe_gemm,
    gemv as moe_gemv,
    reference as moe,
    tiles as moe_tiles,
)
from glowplug.kernels.moe.align import align
from glowplug.kernels.moe.tiles import tile
from tests.support.tables import forget

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
TOLERANCE = 1e-2 if GPU else 1e-5
GEMV = {"way": "gemv", "block_n": 16, "block_k": 32, "warps": 4}
SMALL = [(1, 2, 4, 48, 40), (2, 3, 5, 80, 24), (5, 2, 3, 72, 33), (20, 2, 4, 32, 17)]
LARGE = [
    (1, 8, 66, 2048, 1408),
    (2, 6, 64, 512, 1408),
    (7, 8, 66, 2048, 1408),
    (33, 8, 66, 2048, 1408),
    (128, 8, 66, 2048, 1408),
    (200, 9, 33, 1000, 360),
    (1025, 8, 66, 2048, 1408),
]


def draw(
    tokens: int, k: int, experts: int, hidden: int, inter: int, absent: float, seed: int
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(k, 1).indices.int()
    weights = torch.rand(tokens, k, generator=generator)
    gone = torch.rand(tokens, k, generator=generator) < absent
    ids[gone], weights[gone] = -1, float("nan")
    device = torch.Generator(DEVICE).manual_seed(seed)
    x, w13, w2 = (
        torch.randn(shape, generator=device, device=DEVICE).mul_(shape[-1] ** -0.5 * gain).to(DTYPE)
        for shape, gain in (
            ((tokens, hidden), hidden**0.5),
            ((experts, 2 * inter, hidden), 2.0),
            ((experts, hidden, inter), 1.0),
        )
    )
    return [x, w13, w2, ids.to(DEVICE), weights.to(DEVICE)]


def error(found: Tensor, x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> float:
    """Return the error against float32, relative to the root mean square."""
    wanted = moe.experts_reference(
        x.float(), w13.float().mT, w2.float().mT, ids, weights, silu_and_mul
    )
    assert found.shape == wanted.shape
    return float(
        (found.float() - wanted).square().mean().sqrt()
        / wanted.square().mean().sqrt().clamp(min=1e-9)
    )


def configs(*, swap: bool, tma: bool) -> list[dict[str, dict[str, str | int]]]:
    wide = 64 if GPU else 32
    return [
        {
            "up": tile(way, 16, wide, 32, 4, 2, group=3, swap=swap, tma=tma),
            "down": tile(way, 16, wide, 32, 4, 3, group=1, swap=swap, tma=tma),
        }
        for way in ("dense", "sorted")
    ]


def wider(up: int, down: int) -> dict[str, dict[str, str | int]]:
    """Return a configuration with these column counts in the wide tiles of the fused shared
    experts.
    """
    return {
        "up": tile("sorted", 16, 128 if GPU else 32, 64, 8, 3, swap=True, wide=up),
        "down": tile("sorted", 16, 256 if GPU else 32, 64, 8, 3, swap=True, wide=down),
    }


def check(given: list[Tensor], config: dict[str, dict[str, str | int]]) -> None:
    assert error(moe_experts.experts(*given, config), *given) < TOLERANCE


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize(("swap", "tma"), [(False, False), (True, False)])
def test_tiles(shape: tuple[int, ...], swap: bool, tma: bool) -> None:
    for number, config in enumerate(configs(swap=swap, tma=tma)):
        check(draw(*shape, absent=0.3 * number, seed=number), config)


@pytest.mark.parametrize("shape", SMALL[:3])
@pytest.mark.parametrize("absent", [0.0, 0.5])
def test_gemv(shape: tuple[int, ...], absent: float) -> None:
    check(draw(*shape, absent=absent, seed=3), {"up": GEMV, "down": GEMV})


@pytest.mark.parametrize("shape", [*SMALL, (70, 2, 4, 40, 24), (300, 3, 4, 24, 16)])
def test_the_rule_on_small_problems(shape: tuple[int, ...]) -> None:
    given = draw(*shape, absent=0.2, seed=1)
    assert error(moe_experts.experts(*given), *given) < TOLERANCE


def test_all_absent_and_none() -> None:
    given = draw(3, 2, 4, 32, 16, 1.0, 0)
    for config in ({"up": GEMV, "down": GEMV}, *configs(swap=False, tma=False)):
        assert torch.equal(moe_experts.experts(*given, config), torch.zeros_like(given[0]))
    assert moe_experts.experts(given[0][:0], *given[1:3], given[3][:0], given[4][:0]).shape == (
        0,
        32,
    )


def test_rules_cover_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = moe_tiles.ExpertsProblem(66, 8, 2048, 1408, "bfloat16")
    ways = [
        moe_tiles.dense_experts_rule(problem, tokens)["up"]["way"]
        for tokens in (1, 2, 16, 17, 512, 1024, 100_000)
    ]
    assert ways == ["gemv", "dense", "dense", "sorted", "sorted", "sorted", "sorted"]
    measured = {4: {"up": GEMV, "down": GEMV}, 100: moe_tiles.dense_experts_rule(problem, 64)}
    monkeypatch.setattr(
        tuned, "table", lambda name: measured if name == problem.table_name else None
    )
    forget()
    assert (
        moe_tiles.dense_experts_config(problem, 50) is measured[4]
        and moe_tiles.dense_experts_config(problem, 53) is measured[100]
    )
    measured = {
        16: moe_tiles.dense_experts_rule(problem, 16),
        64: moe_tiles.dense_experts_rule(problem, 64),
    }
    forget()
    assert moe_tiles.dense_experts_config(problem, 16) is measured[16], "a tile of all tokens"
    assert moe_tiles.dense_experts_config(problem, 17) is measured[64]
    forget()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE)
def test_on_the_device(shape: tuple[int, ...]) -> None:
    """The chosen configuration and fixed ones run twice, with poisoned memory."""
    tokens = shape[0]
    fixed = [
        *configs(swap=False, tma=False),
        *configs(swap=True, tma=True),
        *configs(swap=False, tma=True),
    ]
    gemv = (
        [{"up": {**GEMV, "block_k": 256}, "down": {**GEMV, "block_n": 4, "block_k": 256}}]
        if tokens < 64
        else []
    )
    for seed, absent in ((0, 0.0), (1, 0.3)):
        given = draw(*shape, absent=absent, seed=seed)
        poison = torch.full(
            (tokens * shape[1] * max(shape[3:]) * 4,), float("nan"), dtype=DTYPE, device=DEVICE
        )
        del poison
        for config in (None, *gemv, *(fixed if tokens < 64 else fixed[1::2])):
            found = moe_experts.experts(*given, config)
            assert error(found, *given) < TOLERANCE, config
            assert torch.equal(found, moe_experts.experts(*given, config)), "repeats bit by bit"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_replayed_with_other_inputs(tokens: int) -> None:
    given, other = (draw(tokens, 8, 66, 512, 384, 0.1, seed) for seed in (0, 1))
    moe_experts.experts(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = moe_experts.experts(*given)
    for inputs in (given, other, given):
        for static, value in zip(given, [t.clone() for t in inputs], strict=True):
            static.copy_(value)
        found.fill_(float("nan"))
        graph.replay()
        assert error(found, *given) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 40])
def test_the_first_product_of_every_way(tokens: int) -> None:
    x, w13, _, ids, _ = draw(tokens, 4, 8, 64, 32, 0.5, 2)
    aligned, pairs = align(ids, 8, 16), ids.numel()
    wanted = moe_gemv.up(x, w13, ids, GEMV)
    dense = moe_gemm.up(x, w13, ids, None, tile("dense", 16, 64, 64, 4, 3))
    placed = moe_gemm.up(x, w13, ids, aligned, tile("sorted", 16, 64, 64, 4, 3))
    places = aligned.sorted_pairs[: int(aligned.num_padded)].long()
    real = places < pairs
    torch.testing.assert_close(
        placed[: len(places)][real], wanted[places[real]], atol=2e-2, rtol=2e-2
    )
    present = ids.flatten() >= 0
    torch.testing.assert_close(dense[present], wanted[present], atol=2e-2, rtol=2e-2)


def with_shared_experts(given: list[Tensor], shared: int) -> list[Tensor]:
    """Return the inputs with the ``shared`` last experts as every token's last ones, and none of
    them among the others.
    """
    x, w13, w2, ids, weights = given
    routed = len(w13) - shared
    last = torch.arange(routed, len(w13), dtype=ids.dtype, device=ids.device).expand(len(ids), -1)
    others = torch.stack([torch.randperm(routed)[: ids.shape[1] - shared] for _ in ids]).to(ids)
    gone = ids[:, shared:] < 0
    return [
        x,
        w13,
        w2,
        torch.cat([others.masked_fill_(gone, -1), last], 1),
        torch.cat([weights[:, shared:], torch.ones_like(weights[:, :shared])], 1),
    ]


@pytest.mark.parametrize("shared, tokens", [(2, 1), (1, 16), (2, 17), (1, 40), (2, 130)])
def test_experts_of_every_token_share_tiles(shared: int, tokens: int) -> None:
    for number, config in enumerate(
        [*configs(swap=False, tma=False), *configs(swap=True, tma=False)]
    ):
        if config["up"]["way"] == "dense" and tokens > 40:
            continue
        given = with_shared_experts(draw(tokens, 4, 7, 48, 40, 0.3, number), shared)
        assert error(moe_experts.experts(*given, config, shared), *given) < TOLERANCE


@pytest.mark.parametrize(("up", "down"), [(16, 32), (32, 16), (128, 64)])
def test_their_tiles_are_as_wide_as_asked(up: int, down: int) -> None:
    """Columns are left over, too: 40 and 72 of them."""
    config = wider(up, down)
    given = with_shared_experts(draw(21, 4, 7, 72, 40, 0.3, 0), 2)
    assert moe_gemm.fused_shared_tile_sizes(21, True, config["up"])[1] == up
    assert error(moe_experts.experts(*given, config, 2), *given) < TOLERANCE


@pytest.mark.parametrize("shared", [1, 2])
def test_vectors_take_them_like_the_others(shared: int) -> None:
    given = with_shared_experts(draw(2, 4, 7, 48, 40, 0.5, 1), shared)
    assert (
        error(moe_experts.experts(*given, {"up": GEMV, "down": GEMV}, shared), *given) < TOLERANCE
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 24, 33, 64, 100, 128, 129, 200, 256, 512, 1000])
@pytest.mark.parametrize("sizes", [(8, 66, 2048, 1408), (5, 18, 512, 360)])
def test_they_do_on_the_device(tokens: int, sizes: tuple[int, ...]) -> None:
    """The chosen configuration and fixed ones run twice, with poisoned memory."""
    fixed = [
        configs(swap=swap, tma=tma)[1]
        for swap, tma in ((False, False), (True, True), (False, True))
    ]
    fixed += [wider(128, 128), wider(64, 256)]
    for seed, absent in ((0, 0.0), (1, 0.3)):
        given = with_shared_experts(draw(tokens, *sizes, absent=absent, seed=seed), 2)
        poison = torch.full(
            (tokens * sizes[0] * max(sizes[2:]) * 4,), float("nan"), dtype=DTYPE, device=DEVICE
        )
        del poison
        for config in (None, *fixed):
            found = moe_experts.experts(*given, config, 2)
            assert error(found, *given) < TOLERANCE, config
            assert torch.equal(found, moe_experts.experts(*given, config, 2)), "repeats bit by bit"
