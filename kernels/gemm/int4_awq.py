"""GEMM with int4 weights in the layout of ``kernels/formats/awq.py``: y = x W^T, x in 16 bits.

Under Triton's interpreter x is float32. Numbers are unpacked in registers, two per instruction: a
shift, then one operation that masks four bits of each half and puts them into the mantissa of
OFFSET. Subtracting OFFSET + z leaves a small integer, exact in 16 bits. The sum of a group is
scaled in float32. The GEMM is always (W x^T)^T, so that the weight stays in registers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.gemm.split_k import splits_for, sum_splits
from glowplug.kernels.launch import dependent_launch, tuned_tables
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.tuned_tables import Config

DTYPE = "int4_w4a16"
PACKED_BLOCK: tl.constexpr = tl.constexpr(128)  # inputs of a packed block
#: elements of a weight from which tiles of 32 rows are faster than tiles of 16 (H200: 17.0 against
#: 24.1 us for 45 million)
LARGE_WEIGHT_ELEMENTS = 1 << 24
PLANE: tl.constexpr = tl.constexpr(32)  # neighbouring inputs that one shift yields

# t - zero; before SM90 there is no packed bfloat16 subtraction
_BF16 = (
    "{.reg .b32 t, m; mov.b32 m, 0xBF80BF80; shr.b32 t, $1, %d; "
    "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; "
    "fma.rn.bf16x2 $0, $2, m, t;}"
)
_FP16 = (
    "{.reg .b32 t; shr.b32 t, $1, %d; "
    "lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; sub.f16x2 $0, t, $2;}"
)
BF16_0, BF16_1, BF16_2, BF16_3 = (tl.constexpr(_BF16 % (4 * plane)) for plane in range(4))
FP16_0, FP16_1, FP16_2, FP16_3 = (tl.constexpr(_FP16 % (4 * plane)) for plane in range(4))


@triton.jit
def _half(packed, zero, ASM: tl.constexpr):
    """Return q - z in a 16-bit dtype: one plane's 4-bit numbers minus their zeros.

    ``zero`` is OFFSET + z, see :func:`zero_of`. An instruction computes two numbers.
    """
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r", [packed, zero], dtype=zero.dtype, is_pure=True, pack=2
    )


@triton.jit
def scale_of(factors):
    """Unpack the scales of int32 ``factors`` (a scale and a zero each) to float32."""
    return (factors & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def zero_of(factors, DTYPE: tl.constexpr):
    """Unpack the zeros z of int32 ``factors`` to OFFSET + z in the compute dtype."""
    upper = (factors >> 16).to(tl.int16)
    if DTYPE == tl.float32:
        zero = upper.to(tl.float32)
    else:
        zero = upper.to(DTYPE, bitcast=True)
    return zero


@triton.jit
def unpack(packed, factors, DTYPE: tl.constexpr, PLANE_NUMBER: tl.constexpr):
    """Return q - z, 4-bit numbers minus zeros, of one plane: 32 neighbouring inputs.

    Args:
        packed: int16 [R, 32].
        factors: int32 [R].
        DTYPE: The compute dtype.
        PLANE_NUMBER: 0 to 3.

    Returns:
        [R, 32] in ``DTYPE``.
    """
    zero = tl.broadcast_to(zero_of(factors, DTYPE)[:, None], packed.shape)
    if zero.dtype == tl.bfloat16:
        if PLANE_NUMBER == 0:
            value = _half(packed, zero, BF16_0)
        elif PLANE_NUMBER == 1:
            value = _half(packed, zero, BF16_1)
        elif PLANE_NUMBER == 2:
            value = _half(packed, zero, BF16_2)
        else:
            value = _half(packed, zero, BF16_3)
    elif zero.dtype == tl.float16:
        if PLANE_NUMBER == 0:
            value = _half(packed, zero, FP16_0)
        elif PLANE_NUMBER == 1:
            value = _half(packed, zero, FP16_1)
        elif PLANE_NUMBER == 2:
            value = _half(packed, zero, FP16_2)
        else:
            value = _half(packed, zero, FP16_3)
    else:
        value = ((packed >> (4 * PLANE_NUMBER)) & 15).to(tl.float32) - zero
    return value


@triton.jit
def load_plane(x_at, first, depth, EVEN: tl.constexpr):
    """Load inputs ``first`` to ``first + 32`` of the rows at ``x_at``; zeros from ``depth`` on."""
    if EVEN:
        tile = tl.load(x_at + first)
    else:
        tile = tl.load(x_at + first, mask=(first + tl.arange(0, PLANE) < depth)[None, :], other=0.0)
    return tile


@triton.jit
def load_rows(at, inside, EVEN_N: tl.constexpr):
    """Load at the pointers ``at``; pointers that are not ``inside`` give zeros.

    With ``EVEN_N`` all pointers are inside.
    """
    if EVEN_N:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=inside, other=0)
    return value


@triton.jit
def times(packed, factors, x, part, PLANE_NUMBER: tl.constexpr):
    """Return part float32 [N, M] + one plane of the weight times x [M, 32]^T."""
    return tl.dot(
        unpack(packed, factors, x.dtype, PLANE_NUMBER), tl.trans(x), part, input_precision="ieee"
    )


@triton.jit(do_not_specialize=["rows"])
def _gemm(
    x,
    packed,
    factors,
    bias,
    out,
    rows,
    columns,
    depth,
    x_stride,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    EVEN_N: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute one tile of the output over one depth split.

    The second grid index is the number of the split. ``out`` is [splits, M, N].

    ``GROUP`` is 32, 64 or a multiple of 128.
    """
    dependent_launch.begin(DEPENDENT)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0)
    m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(depth, PACKED_BLOCK)
    start = blocks * tl.program_id(1) // tl.num_programs(1)
    end = blocks * (tl.program_id(1) + 1) // tl.num_programs(1)
    real, inside = m < rows, n < columns
    lane = tl.arange(0, PLANE)
    x_at = x + tl.where(real, m, 0).to(tl.int64)[:, None] * x_stride + lane[None, :]
    w_at = packed + n.to(tl.int64)[:, None] * PLANE + lane[None, :]
    step = columns.to(tl.int64) * PLANE
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    dependent_launch.wait(DEPENDENT)
    for block in tl.range(start, end, num_stages=STAGES):  # num_stages also pipelines factors
        words = load_rows(w_at + block * step, inside[:, None], EVEN_N)
        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for plane in tl.static_range(4):
            first = block * PACKED_BLOCK + plane * PLANE
            if plane == 0 or (plane * PLANE) % GROUP == 0:
                group = first // GROUP
                if GROUP < PACKED_BLOCK and not EVEN:
                    group = tl.where(first < depth, group, 0)
                factor = load_rows(factors + group * columns + n, inside, EVEN_N)
            part = times(words, factor, load_plane(x_at, first, depth, EVEN), part, plane)
            if plane == 3 or ((plane + 1) * PLANE) % GROUP == 0:
                total += part * scale_of(factor)[:, None]
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if BIAS:
        if tl.program_id(1) == 0:
            total += load_rows(bias + n, inside, EVEN_N).to(tl.float32)[:, None]
    at = (tl.program_id(1) * rows + m).to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(
        out + at, tl.trans(total).to(out.dtype.element_ty), mask=real[:, None] & inside[None, :]
    )


@triton.jit
def _dequantize(
    packed,
    factors,
    out,
    columns,
    depth,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Dequantise ``BLOCK_N`` outputs of one packed block."""
    dependent_launch.begin(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    inside = n < columns
    lane = tl.arange(0, PLANE)
    at = packed + (block.to(tl.int64) * columns + n)[:, None] * PLANE + lane[None, :]
    words = tl.load(at, mask=inside[:, None], other=0)
    dependent_launch.wait(DEPENDENT)  # the reader of the previous call's ``out`` may still run
    for plane in tl.static_range(4):
        first = block * PACKED_BLOCK + plane * PLANE
        group = first // GROUP * columns + n
        known = tl.where(first < depth, n, columns) < columns
        factor = tl.load(factors + group, mask=known, other=0)
        value = (
            unpack(words, factor, out.dtype.element_ty, plane).to(tl.float32)
            * scale_of(factor)[:, None]
        )
        k = first + lane
        tl.store(
            out + n.to(tl.int64)[:, None] * depth + k[None, :],
            value.to(out.dtype.element_ty),
            mask=inside[:, None] & (k < depth)[None, :],
        )


def int4_gemm_rule(rows: int, columns: int, depth: int) -> Config:
    """Return a configuration by rule for x [rows, depth] and W [columns, depth].

    It is for sizes without a tuned table, and gives enough programs to read the weight with every
    multiprocessor.
    """
    few = rows <= 64
    least = 32 if columns * depth >= LARGE_WEIGHT_ELEMENTS else 16
    block_m, block_n = (
        (max(least, next_power_of_2(rows)), 64) if few else (64 if rows <= 256 else 128, 128)
    )
    tiles = cdiv(rows, block_m) * cdiv(columns, block_n)
    split = splits_for(tiles, depth, 2 * MULTIPROCESSORS if few else MULTIPROCESSORS)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "SPLIT_K": split,
        "num_warps": 4 if few else 8,
        "STAGES": 4 if few else 3,
    }


@lru_cache(maxsize=4096)
def int4_gemm_config(rows: int, columns: int, depth: int) -> Config:
    """Return the tuned configuration for the nearest number of rows; if none fits, the rule's.

    The GEMM multiplies x [rows, depth] by W [columns, depth]^T.
    """
    return tuned_tables.measured_for(
        tuned_tables.file_name(tuned_tables.problem(columns, depth), DTYPE), rows
    ) or int4_gemm_rule(rows, columns, depth)


def gemm(
    x: Tensor,
    packed: Tensor,
    factors: Tensor,
    group: int,
    bias: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Compute x W^T (+ bias).

    Args:
        x: [M, K].
        packed: int16 [ceil(K / 128), N, 32].
        factors: int32 [ceil(K / group), N], made for x's dtype.
        group: Inputs that share a scale: 32, 64, a multiple of 128, or all of K.
        bias: [N] or None.
        config: Tiles; None: those of :func:`int4_gemm_config`.

    Returns:
        [M, N].
    """
    rows, depth = x.shape
    columns = packed.shape[1]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    chosen: dict[str, Any] = dict(config or int4_gemm_config(rows, columns, depth))
    split = chosen.pop("SPLIT_K")
    into = (
        out
        if split == 1
        else torch.empty(split, rows, columns, dtype=torch.float32, device=x.device)
    )
    _gemm[(cdiv(rows, chosen["BLOCK_M"]) * cdiv(columns, chosen["BLOCK_N"]), split)](
        x,
        packed,
        factors,
        factors if bias is None else bias,
        into,
        rows,
        columns,
        depth,
        x.stride(0),
        GROUP=group,
        EVEN=depth % 128 == 0,
        EVEN_N=columns % chosen["BLOCK_N"] == 0,
        BIAS=bias is not None,
        **chosen,
        **dependent_launch.options(),
    )
    if split > 1:
        sum_splits(into, out)
    return out


def dequantize(
    packed: Tensor, factors: Tensor, depth: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Dequantise a weight to [N, depth] in ``dtype``.

    Args:
        packed: int16 [ceil(depth / 128), N, 32].
        factors: int32 [ceil(depth / group), N], made for ``dtype``.
        depth: K.
        group: Inputs that share a scale.
        dtype: Result's dtype.
    """
    blocks, columns, _ = packed.shape
    out = torch.empty(columns, depth, dtype=dtype, device=packed.device)
    _dequantize[(cdiv(columns, 64), blocks)](
        packed,
        factors,
        out,
        columns,
        depth,
        GROUP=group,
        BLOCK_N=64,
        num_warps=4,
        **dependent_launch.options(),
    )
    return out
