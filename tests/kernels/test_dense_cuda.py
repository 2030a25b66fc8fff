"""Dense experts in Triton as a method: the checkpoint's tensors are stored where the kernels read
them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.core.protocols import ExpertsShape
from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.moe import reference as moe
from glowplug.plugins.quantization.dense.experts_cuda import CudaExperts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize(
    ("shared", "first", "start", "inter"), [(0, 0, 0, 24), (2, 0, 0, 24), (0, 2, 8, 16)]
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_targets_and_product(shared: int, first: int, start: int, inter: int, tokens: int) -> None:
    shape = ExpertsShape(
        prefix="mlp.experts",
        count=3,
        first=first,
        hidden=32,
        inter=inter,
        inter_start=start,
        inter_full=24,
        total=6,
        fused_shared=shared,
        shared_prefix="mlp.shared" if shared else "",
    )
    method, generator = (
        CudaExperts(shape, torch.float32, DEVICE),
        torch.Generator().manual_seed(tokens),
    )
    stored: dict[str, Tensor] = {}
    for target in method.targets():
        assert target.name not in stored
        stored[target.name] = torch.randn(target.shape, generator=generator) / 4
        target.store(stored[target.name][target.index])
    method.finalize()
    x = torch.randn(tokens, 32, generator=generator)
    ids = torch.tensor([[0, 2], [1, 0], [-1, 1], [2, 1], [-1, -1]][:tokens])
    weights = torch.rand(tokens, 2, generator=generator)
    cut = slice(start, start + inter)
    gates, ups, downs = (
        [stored[f"mlp.experts.{first + e}.{part}_proj.weight"] for e in range(3)]
        for part in ("gate", "up", "down")
    )
    w13 = torch.stack(
        [torch.cat([gate[cut], up[cut]]) for gate, up in zip(gates, ups, strict=True)]
    ).mT
    w2 = torch.stack([down[:, cut] for down in downs]).mT
    wanted = moe.experts_reference(x, w13, w2, ids, weights, silu_and_mul)
    if shared:
        wanted += swiglu(
            x, *(stored[f"mlp.shared.{part}_proj.weight"] for part in ("gate", "up", "down"))
        )
        ids = torch.cat([ids, torch.tensor([[3, 4]]).expand(tokens, -1)], 1)
        weights = torch.cat([weights, torch.ones(tokens, 2)], 1)
    found = method.apply(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu()
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
