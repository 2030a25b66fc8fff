"""x W^T for some tens of rows of x on Hopper, in Gluon, cut along its depth as well: parts for a
norm to add up.

A program holds its piece of W and of x whole in shared memory. W is on its way before the kernel
that computes x ends, and every piece is short, so that hardly anything is left to do once x is
there: 64 columns by a quarter of 2048.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
ROWS = 64  #: of W a program
STEP = 64  #: columns of W and x that are copied at once: 128 bytes
SPLITS = 4
FEWEST, MOST = 17, 64  #: tokens: below, ``skinny_gemm`` is quicker; beyond, cuBLAS
DEEPEST = 512  #: columns of a piece, what shared memory holds of both


def fits(tokens: int, size: int, depth: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Is x [tokens, depth] times W [size, depth] done sooner here, with the norm that adds up its
    parts?

    Measured on an H200 for W [2048, 2048]: W_UV's product, this one and the norm take 9.9 us for 32
    tokens and 10.5 for 64, with cuBLAS 11.5 and 11.9.
    """
    return (
        FEWEST <= tokens <= MOST
        and depth % (SPLITS * STEP) == 0
        and depth <= SPLITS * DEEPEST
        and cdiv(size, ROWS) * SPLITS <= MULTIPROCESSORS
        and dtype in (torch.bfloat16, torch.float16)
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
    )


@gluon.jit(do_not_specialize=["tokens"])
def slice_kernel(
    x_at,
    w_at,
    out,
    tokens,
    size,
    SPLITS: gl.constexpr,
    STEPS: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """out [tokens * SPLITS, size]: a token's rows are the products of its depth's SPLITS parts,
    STEPS copies each.
    """
    dependent.begin(DEPENDENT)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    STEP: gl.constexpr = w_at.block_type.shape[1]
    first, split = gl.program_id(0) * ROWS, gl.program_id(1)
    w = gl.allocate_shared_memory(w_at.dtype, [STEPS, ROWS, STEP], w_at.layout)
    x = gl.allocate_shared_memory(x_at.dtype, [STEPS, TOKENS, STEP], x_at.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STEPS):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STEPS):
        mbarrier.expect(ready.index(i), w_at.block_type.nbytes + x_at.block_type.nbytes)
        copy_tile(w_at, [first, (split * STEPS + i) * STEP], ready.index(i), w.index(i))
    dependent.wait(DEPENDENT)
    for i in gl.static_range(STEPS):
        copy_tile(x_at, [0, (split * STEPS + i) * STEP], ready.index(i), x.index(i))
    total = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    for i in gl.static_range(STEPS):
        mbarrier.wait(ready.index(i), 0)
        total = warpgroup_mma(w.index(i), x.index(i).permute((1, 0)), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    at = (token * SPLITS + split)[None, :] * size + row[:, None]
    gl.store(
        out + at,
        total.to(out.dtype.element_ty),
        mask=(token < tokens)[None, :] & (row < size)[:, None],
    )


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K], both contiguous, transposed: float32 [T * SPLITS, N], each
    token's rows to be added up. For what ``fits``."""
    (tokens, depth) = x.shape
    size = weight.shape[0]
    padded = max(16, next_power_of_2(tokens))
    out = torch.empty(tokens * SPLITS, size, dtype=torch.float32, device=x.device)
    slice_kernel[(cdiv(size, ROWS), SPLITS)](
        _described(x, padded),
        _described(weight, ROWS),
        out,
        tokens,
        size,
        SPLITS=SPLITS,
        STEPS=depth // SPLITS // STEP,
        ROWS=ROWS,
        TOKENS=padded,
        num_warps=ROWS // 16,
        **dependent.options(),
    )
    return out


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    return TensorDescriptor.from_tensor(
        x, [rows, STEP], gl.NVMMASharedLayout.get_default_for([rows, STEP], dtype)
    )


@cache
def _counted(device: torch.device) -> Tensor:
    return torch.zeros(1, SPLITS, dtype=torch.int32, device=device)


def counted(tokens: int, device: torch.device) -> Tensor:
    """int32 [tokens, SPLITS], ids of parts that all count; its rows are one."""
    return _counted(device).expand(tokens, SPLITS)
