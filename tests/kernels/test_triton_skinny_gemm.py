"""GEMMs of few tokens in Triton against torch's: in the interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.gemm.few_rows import TOKENS_MAX, Tile, few_rows_tile, multiply

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VECTOR, MATRIX = Tile(4, 0, 1, 4), Tile(16, 4, 8, 4)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [(0, VECTOR), (1, VECTOR), (3, VECTOR), (1, MATRIX), (8, MATRIX), (17, MATRIX)],
)
@pytest.mark.parametrize(("size", "depth"), [(1, 128), (33, 100), (48, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_products(tokens: int, tile: Tile, size: int, depth: int, bias: bool) -> None:
    for seed in (0, 1):
        x, weight = randn(tokens, depth + 3, seed=seed)[:, 3:], randn(size, depth, seed=seed + 2)
        added = randn(size, seed=seed + 4) if bias else None
        wanted = x @ weight.t() + (0 if added is None else added)
        torch.testing.assert_close(multiply(x, weight, added, tile), wanted, atol=1e-4, rtol=1e-4)


def test_the_rule_leaves_shapes_that_it_does_not_speed_up_to_others() -> None:
    assert (
        few_rows_tile(1, 129280, 7168)
        and few_rows_tile(8, 2048, 2048)
        and few_rows_tile(TOKENS_MAX, 2048, 2048)
    )
    assert (
        few_rows_tile(1, 64, 20000) is None
        and few_rows_tile(2, 2048, 10944) is None
        and few_rows_tile(8, 64, 64) is None
    )
    assert (
        few_rows_tile(TOKENS_MAX + 1, 2048, 2048) is None
        and few_rows_tile(TOKENS_MAX, 3648, 2048) is None
    )
    assert few_rows_tile(2, 21888, 2048) is None and few_rows_tile(8, 21888, 2048) is None, (
        "the dense layer's first product"
    )
    assert (
        few_rows_tile(1, 21888, 2048)
        and few_rows_tile(8, 10944, 2048)
        and few_rows_tile(8, 24576, 1536)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16])
@pytest.mark.parametrize(
    ("size", "depth"), [(3648, 2048), (2048, 2048), (576, 1408), (24, 136), (2048, 10944)]
)
def test_bfloat16_by_the_rule(tokens: int, size: int, depth: int) -> None:
    tile = few_rows_tile(tokens, size, depth)
    if tile is None:
        return
    for seed in (0, 1):
        x, weight, bias = (
            randn(*shape, seed=seed + i, dtype=torch.bfloat16)
            for i, shape in enumerate(((tokens, depth + 8), (size, depth), (size,)))
        )
        exact = x[:, 8:].float() @ weight.float().t() + bias.float()
        found = multiply(x[:, 8:], weight, bias, tile)
        assert ((found.float() - exact).norm() / exact.norm()).item() < 4e-3
        assert torch.equal(found, multiply(x[:, 8:], weight, bias, tile)), "the same twice"
