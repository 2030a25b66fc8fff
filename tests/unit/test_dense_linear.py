"""Dense linear methods of either layout: the slices they load, their results, and float32 results
on request.
"""

from __future__ import annotations

import pytest
import torch

from glowplug.core.protocols import LinearShape, Quantized
from glowplug.plugins.quantization.dense.layers import DenseLinear
from glowplug.plugins.quantization.dense.layers_cuda import CudaLinear

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def shape(bias: bool, wide: bool = False) -> LinearShape:
    """Return a shape with rows 2 to 6 of a tensor of 8, all 3 rows of another, and columns 16 to 48
    of 64.
    """
    return LinearShape("both", ("a", "b"), (4, 3), 32, (2, 0), 16, ((8, 64), (3, 64)), bias, wide)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", [DenseLinear, CudaLinear])
def test_slices_are_loaded_and_multiplied(
    method: type[DenseLinear], bias: bool, device: str
) -> None:
    linear = method(shape(bias), torch.float32, device)
    stored = {target.name: torch.randn(target.shape) for target in linear.targets()}
    for target in linear.targets():
        target.store(stored[target.name][target.index])
    linear.finalize()
    weight = torch.cat([stored["a.weight"][2:6, 16:48], stored["b.weight"][:, 16:48]]).to(device)
    for tokens in (1, 5):
        x = torch.randn(tokens, 40, device=device)[:, 8:]  # strided
        wanted = x @ weight.t()  # columns from 16 on: the rank with the first columns adds the bias
        torch.testing.assert_close(linear.apply(x), wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(linear.apply(Quantized(x)), wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(linear.dense(), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 33, 200])
def test_wide_results_are_not_rounded(tokens: int) -> None:
    wide, narrow = (CudaLinear(shape(False, w), torch.bfloat16, "cuda") for w in (True, False))
    for linear in (wide, narrow):
        linear.weight.copy_(torch.randn(32, 7, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(tokens, 32, device="cuda").bfloat16()
    exact = x.float() @ wide.weight.float()
    assert wide.apply(x).dtype is torch.float32 and narrow.apply(x).dtype is torch.bfloat16
    torch.testing.assert_close(wide.apply(x), exact, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(narrow.apply(x).float(), exact, atol=1e-2, rtol=1e-2)
