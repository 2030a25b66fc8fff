"""Root-mean-square normalisation in one kernel, one program per token.

The input is a row, a row plus the residual, or the sum of rows of experts plus the residual. The
result is stored unquantised, quantised to E4M3 as in ``kernels.formats.fp8_triton``, or both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.formats.fp8_triton import empty_quantized, store_quantized
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.rows import rows_of

FEW_ROWS_MAX = 128  #: programs that all run at once: about one per multiprocessor


@triton.jit
def add_rows(rows, ids, row, ids_stride, column, inside, size, SUMMED_ROWS: tl.constexpr):
    """Return the sum, in order, of a token's ``SUMMED_ROWS`` rows of ``rows``.

    Rows with negative ids are left out and may contain anything. All rows are loaded before the ids
    are known; the load of a row is wasted only if its expert is on another rank.
    """
    total = tl.zeros(column.shape, tl.float32)
    for number in tl.static_range(SUMMED_ROWS):
        value = tl.load(
            rows + (row * SUMMED_ROWS + number) * size + column, mask=inside, other=0.0
        ).to(tl.float32)
        total += tl.where(tl.load(ids + row * ids_stride + number) >= 0, value, 0.0)
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
    SUMMED_ROWS: tl.constexpr,
    ADD: tl.constexpr,
    PLAIN: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Normalise one token, after adding the residual if ``ADD``.

    ``SUMMED_ROWS``: number of rows of x to sum for the token; 0: x has one row per token.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < size
    dependent_launch.begin(DEPENDENT)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dependent_launch.wait(DEPENDENT)
    if SUMMED_ROWS > 0:
        value = add_rows(x, ids, row, ids_stride, column, inside, size, SUMMED_ROWS)
    else:
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=inside)
        # the next layer reads the rounded sum
        value = rounded.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value) / size + eps) * gain
    if PLAIN:
        tl.store(plain + row * size + column, normed.to(plain.dtype.element_ty), mask=inside)
    if QUANTIZED:
        store_quantized(normed, values, scales, row, group, column, size, scale_stride)


def warps_for(block: int, summed: bool = False, programs: int = FEW_ROWS_MAX + 1) -> int:
    """Return the number of warps of a program that reduces ``block`` elements.

    The kernel has ``programs`` programs. If ``summed``, each element is a sum of several rows.
    """
    if summed and block > 4096:
        return 32
    if summed and block > 1024 and programs <= FEW_ROWS_MAX:
        # sums of 8 rows of 2048 numbers with 8 warps take 0.4 us (128 tokens) and 0.3 us
        # (32 tokens) more
        return 16
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
    """Fill ``plain`` and ``quantized`` with the norm of x, or of x plus the residual.

    x and residual are [rows, N]; with ids [rows, K], whose rows may be strided, x is [rows * K, N].
    The sum with the residual is written to ``total``.
    """
    x = rows_of(x)
    rows, size = x.shape if ids is None else (len(ids), x.shape[1])
    if not rows:
        return
    before = None if residual is None else rows_of(residual)
    groups = next_power_of_2(cdiv(size, FP8_BLOCK))
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
        SUMMED_ROWS=0 if ids is None else ids.shape[1],
        ADD=before is not None,
        PLAIN=plain is not None,
        QUANTIZED=quantized is not None,
        num_warps=warps_for(groups * FP8_BLOCK, ids is not None, rows),
        **dependent_launch.options(),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, rounded once to x's dtype.

    x is [..., N], weight is [N].
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, eps, plain=out)
    return out


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, plain: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`rms_norm` and quantise it from float32 to E4M3.

    Args:
        x: [T, N]; rows may be strided
        weight: [N]
        eps: epsilon of the norm
        plain: [T, N], receives the unquantised norm; None: not stored

    Returns:
        values E4M3 [T, N] and scales float32 [T, ceil(N / 128)], as in ``formats.fp8_triton``
    """
    rows, size = x.shape
    quantized = empty_quantized(rows, size, x.device)
    _launch(x, weight, eps, plain=plain, quantized=quantized)
    return quantized


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(residual + x), residual + x), where the norm is that of the rounded sum.

    Args:
        x: [T, N], or [T * K, N] with ``ids``; not written
        residual: [T, N]; not written
        weight: [N]
        eps: epsilon of the norm
        ids: [T, K]: the K rows of a token with ids >= 0 are first summed in float32; None: one row
            per token

    Returns:
        norm and sum, both [T, N] in the residual's dtype
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
    """Compute :func:`add_rms_norm` with the norm quantised from float32 to E4M3.

    Args:
        x: [T, N], or [T * K, N] with ``ids``; not written
        residual: [T, N]; not written
        weight: [N]
        eps: epsilon of the norm
        plain: [T, N], receives the unquantised norm; None: not stored
        ids: [T, K] or None, see :func:`add_rms_norm`
    """
    rows, size = residual.shape
    quantized = empty_quantized(rows, size, residual.device)
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _launch(
        x, weight, eps, ids=ids, residual=residual, total=total, plain=plain, quantized=quantized
    )
    return quantized, total
