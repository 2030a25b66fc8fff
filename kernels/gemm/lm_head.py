"""x W^T in float32 for few rows of x and a W of very many rows: the head that scores every token.

Reading W is all the time it takes. A result is summed over the whole depth in one program, so that
it does not depend on other rows of x. cuBLAS multiplies where no table of this card says that these
tiles are faster.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glowplug.kernels.launch import dependent_launch as dependent, tuned_tables as tuned
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.tuned_tables import Config

MOST = 128  #: tokens


@triton.jit
def _x_tile(x, token, tokens, start, depth, x_stride, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Columns from ``start`` on of the tokens [T]; zeros behind either end."""
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
    """Columns from ``start`` on of the weight's rows from ``first`` on; behind the last row
    whatever is there.
    """
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
    """out float32 [tokens, size], a program each ``BLOCK_N`` columns; ``weight``: ``stored`` or its
    descriptor.
    ``FETCH``: tiles of W to ask for before x is there."""
    dependent.begin(DEPENDENT)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    if DEPENDENT and FETCH:
        row = tl.minimum(n, size - 1).to(tl.int64)
        column = tl.minimum(tl.arange(0, FETCH) * 64, depth - 1)
        dependent.fetch(stored + row[:, None] * depth + column[None, :])
    dependent.wait(DEPENDENT)
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
def config_for(tokens: int, size: int, depth: int) -> Config | None:
    """How to multiply x [tokens, depth] by W [size, depth], as a table of this card has it for the
    nearest number of tokens; None: cuBLAS.

    A configuration's "way" is "cublas" or "tiles" (BLOCK_N, BLOCK_K, TMA, FETCH, num_warps,
    num_stages).
    """
    if not 0 < tokens <= MOST:
        return None
    found = tuned.measured_for(tuned.head_file_name(size, depth), tokens)
    return None if found is None or found["way"] == tuned.CUBLAS else found


def fits(x: Tensor, weight: Tensor) -> bool:
    """Can ``multiply`` do it?"""
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and x.is_contiguous()
        and weight.is_contiguous()
        and 0 < len(x) <= MOST
        and weight.shape[1] % 8 == 0
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def multiply(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    """x [T, K] times weight [N, K], both contiguous, transposed: float32 [T, N]. For what ``fits``."""
    out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    (tokens, depth) = x.shape
    size = len(weight)
    block_n = config["BLOCK_N"]
    block_k = config["BLOCK_K"]
    held = (
        TensorDescriptor(weight, [size, depth], [depth, 1], [block_n, block_k])
        if config["TMA"]
        else weight
    )
    tiles_kernel[(cdiv(size, block_n),)](
        x,
        held,
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
        **dependent.options(),
    )
    return out
