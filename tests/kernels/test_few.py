"""A few tokens on the CPU are computed by numpy, with the results of torch, which the same
functions use without it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glowplug.kernels.elementwise import cpu_small as few
from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.elementwise.norm_reference import rms_norm
from glowplug.kernels.formats import fp8
from glowplug.kernels.mla.reference import mla_reference
from glowplug.kernels.moe.route_reference import topk_sigmoid

WEIGHT = torch.rand(256, generator=torch.Generator().manual_seed(1)) + 0.5
BIAS = torch.rand(256, generator=torch.Generator().manual_seed(2))


def gate(groups: int, topk_groups: int, renormalize: bool) -> Callable[[Tensor], Tensor]:
    """Return the weights by expert, so that the order of the choice does not matter."""

    def run(x: Tensor) -> Tensor:
        weights, ids = topk_sigmoid(x, BIAS, 6, groups, topk_groups, renormalize, 2.5)
        return torch.zeros_like(x).scatter_(1, ids, weights)

    return run


@pytest.mark.parametrize(
    "function",
    [
        silu_and_mul,
        lambda x: rms_norm(x, WEIGHT, 1e-6),
        gate(1, 1, False),
        gate(8, 3, True),
        gate(128, 30, True),
    ],
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_results_equal_torchs(
    function: Callable[[Tensor], Tensor], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens)) * 4
    x[0, :2] = torch.tensor([-200.0, 200.0])  # exp of either overflows one way
    found = function(x)
    monkeypatch.setattr(few, "FEW_ELEMENTS_MAX", 0)
    torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 7])
def test_fused_rounding_is_the_two_steps_bit_for_bit(tokens: int) -> None:
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens))
    before = x.clone()
    assert torch.equal(
        fp8.rms_norm_rounded(x, WEIGHT, 1e-6), fp8.fake_quantize_tokens(rms_norm(x, WEIGHT, 1e-6))
    )
    assert torch.equal(fp8.silu_and_mul_rounded(x), fp8.fake_quantize_tokens(silu_and_mul(x)))
    assert torch.equal(x, before), "the input is not overwritten"


def test_rounding_few_is_rounding_many(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(9, 384, generator=torch.Generator().manual_seed(3)) * torch.logspace(
        -30, 30, 9
    ).unsqueeze(1)
    found = fp8.fake_quantize_tokens(x)
    monkeypatch.setattr(few, "FEW_ELEMENTS_MAX", 0)
    assert torch.equal(found, fp8.fake_quantize_tokens(x))


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize(
    ("heads", "nope", "rope", "size", "value"),
    [(3, 8, 4, 16, 6), (8, 64, 128, 128, 64), (1, 1, 2, 3, 5)],
)
def test_attend_row_is_the_definition(
    width: int, heads: int, nope: int, rope: int, size: int, value: int
) -> None:
    for keys in (
        width,
        width + 1,
        61,
        few.row_keys(heads, nope, rope, size, value) if size > 16 else 200,
    ):
        shapes = (
            (width, heads, nope),
            (width, heads, rope),
            (keys, size),
            (keys, rope),
            (heads, nope, size),
            (heads, size, value),
        )
        generator = torch.Generator().manual_seed(keys)
        args = [torch.randn(shape, generator=generator) * 0.5 for shape in shapes]
        before = [x.clone() for x in args]
        found = torch.from_numpy(few.attend_row(*(x.numpy() for x in args), 0.3))
        torch.testing.assert_close(
            found.double(), mla_reference(*args, 0.3).flatten(1), rtol=1e-4, atol=2e-5
        )
        assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True)), (
            "the cache is not overwritten"
        )


def test_row_keys_stay_below_the_threads_of_the_product() -> None:
    assert few.row_keys(8, 64, 128, 128, 64) == 255
    assert few.row_keys(128, 128, 64, 512, 128) == 0, "published sizes go through torch"
