"""Gated activations in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv
from glowplug.kernels.launch.rows import rows_of

PROGRAM_ELEMENTS = 1024  #: elements per program


@triton.jit
def _silu_and_mul(x, out, x_stride, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Compute BLOCK elements of silu(gate) * up for one row."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * size + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside
    )


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up [..., I] for x [..., 2I], gate first, rounded once to x's dtype."""
    flat = rows_of(x)
    rows = flat.shape[0]
    size = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    if rows:
        _silu_and_mul[(rows, cdiv(size, PROGRAM_ELEMENTS))](
            flat, out, flat.stride(0), size, BLOCK=PROGRAM_ELEMENTS, **dependent_launch.options()
        )
    return out
