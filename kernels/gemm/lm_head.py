"""GEMM of the LM head, x W^T in float32 for few rows of x and a W with very many rows.

It is limited by reading W. One program sums a result over the whole depth, so that the result does
not depend on other rows of x. The kernel runs only where a table of this card shows that it is
faster; otherwise cuBLAS is used.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glowplug.kernels.launch import dependent_launch, tuned_tables
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.tuned_tables import Config

TOKENS_MAX = 128  #: most tokens that the kernel supports
#: numbers of ranks whose equal slices of a head use its table. NOTE: programs are the same, only
#: fewer; cuBLAS took 71 us for half of V2-Lite's head, whose bytes take 49 (8 rows, traced on H200)
SLICES = (1, 2, 4, 8, 16)


@triton.jit
def _x_tile(x, token, tokens, start, depth, x_stride, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Load ``BLOCK_K`` columns of the rows ``token`` of x; zeros beyond the ends of x."""
    k = start + tl.arange(0, BLOCK_K)
    real = (token < tokens)[:, None]
    if not EVEN:
        real = real & (k < depth)[None, :]
    return tl.load(x + token[:, None] * x_stride + k[None, :], mask=real, other=0.0)


@triton.jit
def _w_tile(
    weight,
    first,
    start,
    size,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load ``BLOCK_K`` columns of ``BLOCK_N`` weight rows. Rows beyond the last are undefined."""
    if TMA:
        tile = weight.load([first, start])
    else:
        n, k = first + tl.arange(0, BLOCK_N), start + tl.arange(0, BLOCK_K)
        at = weight + tl.where(n < size, n, 0).to(tl.int64)[:, None] * depth + k[None, :]
        if EVEN:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(k < depth)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["tokens"])
def tiles_kernel(
    x,
    weight,
    stored,
    out,
    tokens,
    size,
    depth,
    x_stride,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    FETCH: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute ``BLOCK_N`` columns of out float32 [tokens, size].

    ``weight`` is ``stored`` or its TMA descriptor. ``FETCH`` is the number of 64-column runs of W
    that are prefetched before x is available.
    """
    dependent_launch.begin(DEPENDENT)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    if DEPENDENT and FETCH:
        row = tl.minimum(n, size - 1).to(tl.int64)
        column = tl.minimum(tl.arange(0, FETCH) * 64, depth - 1)
        dependent_launch.fetch(stored + row[:, None] * depth + column[None, :])
    dependent_launch.wait(DEPENDENT)
    token = tl.arange(0, TOKENS)
    total = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    for start in range(0, depth, BLOCK_K):
        values = _x_tile(x, token, tokens, start, depth, x_stride, BLOCK_K, EVEN)
        held = _w_tile(weight, first, start, size, depth, BLOCK_N, BLOCK_K, TMA, EVEN)
        total = tl.dot(held, values.T, total, input_precision="ieee")
    tl.store(
        out + token.to(tl.int64)[None, :] * size + n[:, None],
        total,
        mask=(token < tokens)[None, :] & (n < size)[:, None],
    )


@lru_cache(maxsize=4096)
def lm_head_config(tokens: int, size: int, depth: int) -> Config | None:
    """Return the configuration for x [tokens, depth] and W [size, depth]; None: use cuBLAS.

    The configuration is that of this card's tuned table for the nearest token count: of W's own
    table, else of that of a head of which W is a rank's slice. The key "way" is "cublas" or "tiles"
    (then with BLOCK_N, BLOCK_K, TMA, FETCH, num_warps, num_stages).
    """
    if not 0 < tokens <= TOKENS_MAX:
        return None
    for ranks in SLICES:
        found = tuned_tables.measured_for(tuned_tables.head_file_name(ranks * size, depth), tokens)
        if found is not None:
            return None if found["way"] == tuned_tables.CUBLAS else found
    return None


def lm_head_fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`multiply` supports x [T, K] and weight [N, K].

    They must be bfloat16, contiguous and aligned to 16 bytes, with at most ``TOKENS_MAX`` tokens
    and K a multiple of 8.
    """
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and x.is_contiguous()
        and weight.is_contiguous()
        and 0 < len(x) <= TOKENS_MAX
        and weight.shape[1] % 8 == 0
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def multiply(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    """Compute x W^T for operands that :func:`lm_head_fits` accepts.

    Args:
        x: bfloat16 [T, K], contiguous.
        weight: bfloat16 [N, K], contiguous.
        config: The result of :func:`lm_head_config`.

    Returns:
        float32 [T, N].
    """
    out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    (tokens, depth) = x.shape
    size = len(weight)
    block_n = config["BLOCK_N"]
    block_k = config["BLOCK_K"]
    weight_operand = (
        TensorDescriptor(weight, [size, depth], [depth, 1], [block_n, block_k])
        if config["TMA"]
        else weight
    )
    tiles_kernel[(cdiv(size, block_n),)](
        x,
        weight_operand,
        weight,
        out,
        tokens,
        size,
        depth,
        x.stride(0),
        TOKENS=max(16, next_power_of_2(tokens)),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TMA=config["TMA"],
        FETCH=config["FETCH"],
        EVEN=depth % block_k == 0,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        **dependent_launch.options(),
    )
    return out
