"""Fused shared experts as one dense MLP, for loads that are limited by the tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.elementwise.activation import silu_and_mul


def mlp(x: Tensor, w13: Tensor, w2: Tensor, out: Tensor) -> None:
    """Write the sum of S experts' outputs to ``out``.

    NOTE: a single GEMM over all S of w2 would need them side by side, [H, S * I], a layout that no
    other kernel here reads.

    Args:
        x: [T, H].
        w13: [S, 2I, H], gates before ups.
        w2: [S, H, I].
        out: [T, H]; its rows may be strided.
    """
    experts, width, hidden = w13.shape
    inner = silu_and_mul(torch.mm(x, w13.view(-1, hidden).t()).view(-1, width)).view(
        len(x), experts, width // 2
    )
    torch.mm(inner[:, 0], w2[0].t(), out=out)
    for expert in range(1, experts):
        torch.addmm(out, inner[:, expert], w2[expert].t(), out=out)
