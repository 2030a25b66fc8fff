"""Products with int4 weights in the layout of ``kernels/awq.py``: y = x W^T, x in 16 bits (float32 when interpreted).

Numbers are unpacked in registers, two an instruction: a shift, and one operation that masks four bits of each half and
puts them into the mantissa of OFFSET, from which OFFSET + z is taken away. What is left is a small integer, exact in
16 bits; partial products of a group are scaled in float32. Always as (W x^T)^T, so that the weight stays in registers.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.triton import dependent, tuned
from glowplug.kernels.triton.tuned import Config

DTYPE = "int4_w4a16"
BLOCK: tl.constexpr = tl.constexpr(128)  # inputs of a packed block
PLANE: tl.constexpr = tl.constexpr(32)  # neighbouring inputs that one shift yields

_BF16 = "{.reg .b32 t; shr.b32 t, $1, %d; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; sub.bf16x2 $0, t, $2;}"
_FP16 = "{.reg .b32 t; shr.b32 t, $1, %d; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; sub.f16x2 $0, t, $2;}"
BF16_0, BF16_1, BF16_2, BF16_3 = (tl.constexpr(_BF16 % (4 * plane)) for plane in range(4))
FP16_0, FP16_1, FP16_2, FP16_3 = (tl.constexpr(_FP16 % (4 * plane)) for plane in range(4))


@triton.jit
def _half(packed, zero, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [packed, zero], dtype=zero.dtype, is_pure=True, pack=2)


@triton.jit
def unpack(packed, zero, PLANE_NUMBER: tl.constexpr):
    """packed int16 [R, 32], zero [R] = OFFSET + z in the compute dtype -> q - z of one plane, [R, 32] in that dtype."""
    zero = tl.broadcast_to(zero[:, None], packed.shape)
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
    """Inputs ``first`` to ``first + 32`` of the rows at ``x_at``; zeros behind ``depth``."""
    if EVEN:
        tile = tl.load(x_at + first)
    else:
        tile = tl.load(x_at + first, mask=(first + tl.arange(0, PLANE) < depth)[None, :], other=0.0)
    return tile


@triton.jit
def times(packed, zero, x, part, PLANE_NUMBER: tl.constexpr):
    """part float32 [N, M] + one plane of the weight times x [M, 32]^T."""
    return tl.dot(unpack(packed, zero, PLANE_NUMBER), tl.trans(x), part, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def _gemm(x, packed, scales, zeros, bias, out, rows, columns, depth, x_stride,
          GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
          DEPENDENT: tl.constexpr):
    """The second grid dimension splits the depth into parts, [parts, M, N]. A group is 32, 64 or so many blocks."""
    dependent.begin(DEPENDENT)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0)
    m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(depth, BLOCK)
    start = blocks * tl.program_id(1) // tl.num_programs(1)
    end = blocks * (tl.program_id(1) + 1) // tl.num_programs(1)
    real, inside = m < rows, n < columns
    held = tl.where(inside, n, 0)
    lane = tl.arange(0, PLANE)
    x_at = x + tl.where(real, m, 0).to(tl.int64)[:, None] * x_stride + lane[None, :]
    w_at = packed + held.to(tl.int64)[:, None] * PLANE + lane[None, :]
    step = columns.to(tl.int64) * PLANE
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    dependent.wait(DEPENDENT)
    for block in range(start, end):
        words = tl.load(w_at + block * step)
        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for plane in tl.static_range(4):
            first = block * BLOCK + plane * PLANE
            if plane == 0 or (plane * PLANE) % GROUP == 0:
                group = first // GROUP * columns + held
                if GROUP < BLOCK and not EVEN:
                    group = tl.where(first < depth, group, held)
                zero = tl.load(zeros + group)
                scale = tl.load(scales + group)
            part = times(words, zero, load_plane(x_at, first, depth, EVEN), part, plane)
            if plane == 3 or ((plane + 1) * PLANE) % GROUP == 0:
                total += part * scale.to(tl.float32)[:, None]
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if BIAS:
        if tl.program_id(1) == 0:
            total += tl.load(bias + held).to(tl.float32)[:, None]
    at = (tl.program_id(1) * rows + m).to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out + at, tl.trans(total).to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["count"])
def _sum_parts(parts, out, size, count, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for part in range(count):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _dequantize(packed, scales, zeros, out, columns, depth, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
                DEPENDENT: tl.constexpr):
    dependent.begin(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    inside = n < columns
    lane = tl.arange(0, PLANE)
    at = packed + (block.to(tl.int64) * columns + n)[:, None] * PLANE + lane[None, :]
    words = tl.load(at, mask=inside[:, None], other=0)
    dependent.wait(DEPENDENT)  # what reads ``out`` of the call before may still run
    for plane in tl.static_range(4):
        first = block * BLOCK + plane * PLANE
        group = first // GROUP * columns + n
        known = tl.where(first < depth, n, columns) < columns
        value = unpack(words, tl.load(zeros + group, mask=known, other=0.0), plane).to(tl.float32)
        value *= tl.load(scales + group, mask=known, other=0.0).to(tl.float32)[:, None]
        k = first + lane
        tl.store(out + n.to(tl.int64)[:, None] * depth + k[None, :], value.to(out.dtype.element_ty),
                 mask=inside[:, None] & (k < depth)[None, :])


def rule(rows: int, columns: int, depth: int) -> Config:
    """A configuration for a problem that nobody has tuned: enough programs to read the weight with every core."""
    if rows > 64:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "SPLIT_K": 1, "num_warps": 8, "num_stages": 3}
    split = 1
    while columns // 64 * split < 132 and depth // 128 // (2 * split) >= 4:
        split *= 2
    return {"BLOCK_M": max(16, triton.next_power_of_2(rows)), "BLOCK_N": 64, "SPLIT_K": split, "num_warps": 4,
            "num_stages": 4}


@lru_cache(maxsize=4096)
def config_for(rows: int, columns: int, depth: int) -> Config:
    found = tuned.table(tuned.file_name(f"N={columns},K={depth}", DTYPE))
    if not found or rows > 2 * max(found):  # tiles for few rows are no good for many
        return rule(rows, columns, depth)
    return tuned.nearest(found, rows)


def gemm(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, group: int, bias: Tensor | None = None,
         config: Config | None = None) -> Tensor:
    """x [M, K], packed int16 [ceil(K / 128), N, 32], scales and zeros [ceil(K / group), N] in x's dtype -> [M, N].

    ``group``: 32, 64, or a multiple of 128 (or all of K). bias [N] is added.
    """
    rows, depth = x.shape
    columns = packed.shape[1]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    chosen: dict[str, Any] = dict(config or config_for(rows, columns, depth))
    split = chosen.pop("SPLIT_K")
    into = out if split == 1 else torch.empty(split, rows, columns, dtype=torch.float32, device=x.device)
    _gemm[(triton.cdiv(rows, chosen["BLOCK_M"]) * triton.cdiv(columns, chosen["BLOCK_N"]), split)](
        x, packed, scales, zeros, scales if bias is None else bias, into, rows, columns, depth, x.stride(0),
        GROUP=group, EVEN=depth % 128 == 0, BIAS=bias is not None, **chosen, **dependent.options())
    if split > 1:
        size = rows * columns
        _sum_parts[(triton.cdiv(size, 512),)](into, out, size, split, WIDTH=512, **dependent.options())
    return out


def dequantize(packed: Tensor, scales: Tensor, zeros: Tensor, depth: int, group: int) -> Tensor:
    """[N, depth] in the dtype of ``scales``."""
    blocks, columns, _ = packed.shape
    out = torch.empty(columns, depth, dtype=scales.dtype, device=packed.device)
    _dequantize[(triton.cdiv(columns, 64), blocks)](packed, scales, zeros, out, columns, depth, GROUP=group,
                                                    BLOCK_N=64, num_warps=4, **dependent.options())
    return out
