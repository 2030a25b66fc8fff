"""Split-K GEMM x W^T for tens of tokens on Hopper, in Gluon; a norm sums the splits.

A program holds its whole piece of W and of x in shared memory: 64 rows of W by a quarter of a depth
of 2048, for example. W is loaded before the kernel that computes x ends, and a piece is small, so
that little work is left when x is available.
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

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
PROGRAM_ROWS = 64  #: rows of W per program
COPY_COLUMNS = 64  #: columns of W and x in one TMA copy: 128 bytes
SPLITS = 4  #: splits of the depth
TOKENS_MIN = 17  #: fewest tokens of this kernel; for fewer ``gemm.few_rows`` is faster
TOKENS_MAX = 64  #: most tokens of this kernel; for more cuBLAS is faster
SPLIT_COLUMNS_MAX = 512  #: most columns of a split for which W and x fit into shared memory


def split_depth_pays(
    tokens: int, size: int, depth: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether this GEMM, with a norm that sums the splits, is faster than the alternatives.

    Measured on an H200 for W [2048, 2048]: W_UV's GEMM before it, this GEMM and the norm together
    take 9.9 us for 32 tokens and 10.5 us for 64; with cuBLAS instead 11.5 and 11.9 us.

    Args:
        tokens: Rows of x.
        size: Rows of W.
        depth: Columns of x and W.
        dtype: Dtype of both.
        device: Their device.
    """
    return (
        TOKENS_MIN <= tokens <= TOKENS_MAX
        and depth % (SPLITS * COPY_COLUMNS) == 0
        and depth <= SPLITS * SPLIT_COLUMNS_MAX
        and cdiv(size, PROGRAM_ROWS) * SPLITS <= MULTIPROCESSORS
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
    """Compute out [tokens * SPLITS, size], with one row for each split of a token.

    Each program loads the columns of its split in ``STEPS`` copies.
    """
    dependent_launch.begin(DEPENDENT)
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
    dependent_launch.wait(DEPENDENT)
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
    """Compute x W^T as ``SPLITS`` unsummed splits, for sizes that :func:`split_depth_pays` accepts.

    Args:
        x: [T, K], contiguous.
        weight: [N, K], contiguous.

    Returns:
        float32 [T * SPLITS, N]; the sum of a token's ``SPLITS`` rows is its result.
    """
    (tokens, depth) = x.shape
    size = weight.shape[0]
    padded = max(16, next_power_of_2(tokens))
    out = torch.empty(tokens * SPLITS, size, dtype=torch.float32, device=x.device)
    slice_kernel[(cdiv(size, PROGRAM_ROWS), SPLITS)](
        _descriptor(x, padded),
        _descriptor(weight, PROGRAM_ROWS),
        out,
        tokens,
        size,
        SPLITS=SPLITS,
        STEPS=depth // SPLITS // COPY_COLUMNS,
        ROWS=PROGRAM_ROWS,
        TOKENS=padded,
        num_warps=PROGRAM_ROWS // 16,
        **dependent_launch.options(),
    )
    return out


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor of ``x`` in tiles of ``rows`` x ``COPY_COLUMNS``."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    return TensorDescriptor.from_tensor(
        x,
        [rows, COPY_COLUMNS],
        gl.NVMMASharedLayout.get_default_for([rows, COPY_COLUMNS], dtype),
    )


@cache
def _one_row_of_ids(device: torch.device) -> Tensor:
    """Return int32 zeros [1, SPLITS] on ``device``, the shared row of :func:`split_ids`."""
    return torch.zeros(1, SPLITS, dtype=torch.int32, device=device)


def split_ids(tokens: int, device: torch.device) -> Tensor:
    """Return int32 ids [tokens, SPLITS], all >= 0, so that a sum by ids includes every split.

    The norm takes them as its ``ids``. All rows share the memory of one row.
    """
    return _one_row_of_ids(device).expand(tokens, SPLITS)
