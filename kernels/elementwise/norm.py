"""Root-mean-square normalisation in one kernel, a program a token: of a row, of a row added to the
residual, or of rows of experts added up and then to the residual; stored as it is, quantised to
E4M3 as in ``fp8_quant``, or both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8_triton import GROUP, empty_quantized, store_quantized
from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.rows import rows_of

FEW_ROWS = 128  #: about as many as there are processors


@triton.jit
def add_parts(parts, ids, row, ids_stride, column, inside, size, PARTS: tl.constexpr):
    """The sum in order of a token's ``PARTS`` rows of ``parts``; those of negative ids do not count
    and hold anything.

    Rows are asked for before it is known which count: only where experts are elsewhere is one read
    in vain.
    """
    total = tl.zeros(column.shape, tl.float32)
    for part in tl.static_range(PARTS):
        value = tl.load(parts + (row * PARTS + part) * size + column, mask=inside, other=0.0).to(
            tl.float32
        )
        total += tl.where(tl.load(ids + row * ids_stride + part) >= 0, value, 0.0)
    return total


@triton.jit(do_not_specialize=["ids_stride", "scale_stride"])
def _norm(
    x,
    ids,
    residual,
    weight,
    total,
    plain,
    values,
    scales,
    x_stride,
    ids_stride,
    residual_stride,
    size,
    scale_stride,
    eps,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    PLAIN: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """``PARTS``: rows of x that make up a token's, 0 for its own alone."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < size
    dependent.begin(DEPENDENT)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dependent.wait(DEPENDENT)
    if PARTS > 0:
        value = add_parts(x, ids, row, ids_stride, column, inside, size, PARTS)
    else:
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=inside)
        value = rounded.to(
            tl.float32
        )  # what the next layer will read, not what the sum was before rounding
    normed = value * tl.rsqrt(tl.sum(value * value) / size + eps) * gain
    if PLAIN:
        tl.store(plain + row * size + column, normed.to(plain.dtype.element_ty), mask=inside)
    if QUANTIZED:
        store_quantized(normed, values, scales, row, group, column, size, scale_stride)


def warps_for(block: int, parts: bool = False, rows: int = FEW_ROWS + 1) -> int:
    """Warps of each of ``rows`` programs that reduces ``block`` elements, each of them a sum where
    there are ``parts``.
    """
    if parts and block > 4096:
        return 32
    if parts and block > 1024 and rows <= FEW_ROWS:
        return 16  # 8 parts of 2048 numbers, 128 rows and 32: 0.4 and 0.3 us less than with 8
    return 4 if block <= 1024 else 8 if block <= 4096 else 16


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    ids: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    plain: Tensor | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill ``plain`` and ``quantized`` with the norm of x, or of x and the residual, whose sum goes
    into ``total``.

    x and residual [rows, N]; with ids [rows, K], rows strided at will, x is [rows * K, N].
    """
    x = rows_of(x)
    rows, size = x.shape if ids is None else (len(ids), x.shape[1])
    if not rows:
        return
    before = None if residual is None else rows_of(residual)
    groups = next_power_of_2(cdiv(size, GROUP))
    values, scales = (None, None) if quantized is None else quantized
    _norm[(rows,)](
        x,
        ids,
        before,
        weight,
        total,
        plain,
        values,
        scales,
        x.stride(0),
        0 if ids is None else ids.stride(0),
        0 if before is None else before.stride(0),
        size,
        0 if scales is None else scales.stride(1),
        eps,
        GROUPS=groups,
        PARTS=0 if ids is None else ids.shape[1],
        ADD=before is not None,
        PLAIN=plain is not None,
        QUANTIZED=quantized is not None,
        num_warps=warps_for(groups * GROUP, ids is not None, rows),
        **dependent.options(),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> x / sqrt(mean(x^2) + eps) * weight, rounded once to x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, eps, plain=out)
    return out


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, plain: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [T, N] -> its norm quantised from float32: values and scales. As it is into ``plain`` [T,
    N], too.
    """
    quantized = empty_quantized(*x.shape, x.device)
    _launch(x, weight, eps, plain=plain, quantized=quantized)
    return quantized


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x), the norm being of the rounded sum. Neither argument
    is written.

    With ids [T, K] x is [T * K, N], of which each token's rows with ids of 0 and above are added up
    first, in float32.
    """
    out, total = (
        torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2)
    )
    _launch(x, weight, eps, ids=ids, residual=residual, total=total, plain=out)
    return out, total


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    plain: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """:func:`add_rms_norm` quantised from float32; as it is into ``plain`` [T, N], too."""
    quantized = empty_quantized(*residual.shape, residual.device)
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _launch(
        x, weight, eps, ids=ids, residual=residual, total=total, plain=plain, quantized=quantized
    )
    return quantized, total
