"""Experts that every token chose as one dense MLP, for loads at which tensor cores are what takes
time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.elementwise.activation import silu_and_mul


def mlp(x: Tensor, w13: Tensor, w2: Tensor, out: Tensor) -> None:
    """x [T, H], w13 [S, 2I, H] gates before ups, w2 [S, H, I] -> the sum of the S experts into out
    [T, H], whose rows may be strided.

    NOTE: one product over all S of w2 would want them side by side, [H, S * I], which no other way
    reads.
    """
    experts, width, hidden = w13.shape
    inner = silu_and_mul(torch.mm(x, w13.view(-1, hidden).t()).view(-1, width)).view(
        len(x), experts, width // 2
    )
    torch.mm(inner[:, 0], w2[0].t(), out=out)
    for expert in range(1, experts):
        torch.addmm(out, inner[:, expert], w2[expert].t(), out=out)
