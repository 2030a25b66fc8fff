"""Fused shared experts that begin while the gate still chooses give the results of beginning
after it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.moe import experts as moe_experts
from glowplug.kernels.moe.gemm import Early
from glowplug.kernels.moe.route import route
from glowplug.kernels.moe.tiles import tile

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
Given = tuple[Tensor, Tensor, Tensor, Tensor]


def draw(tokens: int, experts: int, hidden: int, inter: int, seed: int) -> Given:
    """Return x, gate, w13 and w2; there are two more experts than the gate has."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = (
        (tokens, hidden),
        (experts, hidden),
        (experts + 2, 2 * inter, hidden),
        (experts + 2, hidden, inter),
    )
    x, gate, w13, w2 = (
        torch.randn(shape, generator=generator, device=DEVICE).mul_(shape[-1] ** -0.5).to(DTYPE)
        for shape in shapes
    )
    return x * hidden**0.5, gate, w13, w2


def tiles(tokens: int) -> dict[str, dict[str, str | int]]:
    small = tile(
        "dense" if tokens <= 16 else "sorted", 16 if tokens <= 64 else 64, 32, 32, 4, 2, group=4
    )
    return {"up": small, "down": small}


def config(tokens: int) -> dict[str, dict[str, str | int]] | None:
    return None if GPU else tiles(tokens)


def mixture(given: Given, k: int, ready: Tensor | None) -> Tensor:
    x, gate, w13, w2 = given
    chosen = config(len(x))
    early = None if ready is None else moe_experts.begin(x, w13, k + 2, 2, ready, chosen)
    assert (early is None) == (ready is None)
    weights, ids = route(
        x, gate, None, k, 1, 1, False, 1.0, 2, None if early is None else early.ready
    )
    if early is not None and not GPU:
        assert ready is not None and ready.tolist() == [1, 0]
    return moe_experts.experts(x, w13, w2, ids, weights, chosen, 2, early)


@pytest.mark.parametrize("tokens", [5, 16, 17, 40, 131])
def test_the_same_results(tokens: int) -> None:
    given, ready = draw(tokens, 5, 48, 40, tokens), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    wanted = mixture(given, 2, None)
    for _ in range(2):
        torch.testing.assert_close(
            mixture(given, 2, ready), wanted, atol=1e-5 if not GPU else 0, rtol=0
        )
        assert not ready.any(), "as they were"


def test_no_early_beginning_for_few_or_many_tokens() -> None:
    ready = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for tokens in (0, 1, moe_experts.EARLY_TOKENS_MIN - 1, moe_experts.EARLY_TOKENS_MAX + 1):
        x, _, w13, _ = draw(tokens, 5, 48, 40, 0)
        assert moe_experts.begin(x, w13, 4, 2, ready, tiles(tokens)) is None
    x, _, w13, _ = draw(moe_experts.EARLY_TOKENS_MAX, 5, 48, 40, 0)
    assert moe_experts.begin(x, w13, 4, 2, ready, tiles(len(x))) is not None
    x, _, w13, _ = draw(40, 5, 48, 40, 0)
    assert moe_experts.begin(x.t().contiguous().t(), w13, 4, 2, ready) is None
    assert moe_experts.begin(x, w13, 4, 0, ready) is None
    # from 256 tokens a library scores 130 experts
    for tokens, starts in ((255, True), (256, False)):
        x, _, w13, _ = draw(tokens, 130, 32, 16, 0)
        assert (moe_experts.begin(x, w13, 4, 2, ready, tiles(40)) is not None) == starts


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 8, 16, 17, 32, 64, 128, 129, 160, 192, 256, 320, 384])
def test_replayed_on_the_device(tokens: int) -> None:
    """Several layers in one graph are replayed, poisoned between replays, with other inputs
    each time.
    """
    layers = [draw(tokens, 64, 2048, 1408, layer) for layer in range(2)]
    flags = [torch.zeros(2, dtype=torch.int32, device=DEVICE) for _ in layers]
    x = layers[0][0].clone()

    def both(early: bool) -> list[Tensor]:
        return [
            mixture((x, *layer[1:]), 6, flag if early else None)
            for layer, flag in zip(layers, flags, strict=True)
        ]

    both(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(True)
    for _ in range(20):
        x.normal_()
        for part in found:
            part.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, both(False), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(both(True), both(False), strict=True))
    assert not torch.stack(flags).any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [32, 256, 384])
def test_without_a_sign_they_wait_for_all_before(tokens: int) -> None:
    x, gate, w13, w2 = draw(tokens, 64, 2048, 1408, 1)
    ready = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    early = moe_experts.begin(x, w13, 8, 2, ready)
    assert isinstance(early, Early)
    weights, ids = route(x, gate, None, 6, 1, 1, False, 1.0, 2)
    found = moe_experts.experts(x, w13, w2, ids, weights, None, 2, early)
    assert torch.equal(found, moe_experts.experts(x, w13, w2, ids, weights, None, 2))
    assert not ready.any()
