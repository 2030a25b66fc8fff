"""Small kernels for a few float32 tokens in host memory, in numpy.

A decoding step of a small model on the CPU spends more on calls than on arithmetic, and a numpy
call costs a third of a torch call. x is float32 [T, N], contiguous in its last dimension; results
are new arrays unless the name says "into". Products stay below the size from which OpenBLAS wakes
threads of its own, which torch's thread count does not bind.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats: TypeAlias = NDArray[np.float32]

FEW = 1 << 14  #: elements up to which these beat torch
GROUP = 128  #: channels that share a scale
TINY = 1e-10  #: smallest absolute maximum of a group, as in the published activation kernel
E4M3_MAX = np.float32(448.0)
EXPONENT_BITS = np.int32(0x7F800000)
ROUNDING = np.float32(
    1.5 * 2.0**20
)  #: keeps 3 of 23 mantissa bits when added to a number's power of two
SMALLEST_ROUNDING = np.float32(
    1.5 * 2.0**14
)  #: the same at 2^-6, below which E4M3's grid stays 2^-9 wide
ONE = np.float32(1.0)
ONE_THREAD_VECTOR = (
    9216  #: elements of a matrix below which OpenBLAS multiplies a vector by it in one thread
)
ONE_THREAD_MATRIX = 1 << 18  #: multiplications of a matrix product below which it does
ROW_QUERIES = 8  #: queries of a row up to which it is attended to here
LARGEST_EXPONENT = np.float32(88.0)  #: exp of more overflows float32


def is_few(x: Tensor) -> bool:
    """Are these kernels for ``x``?"""
    return x.dtype is torch.float32 and x.is_cpu and 0 < x.numel() <= FEW


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight [N]."""
    if x.size == weight.size:
        row = x.ravel()
        normed: Floats = x * (1.0 / math.sqrt(float(row.dot(row)) / row.size + eps))
        normed *= weight
        return normed
    scale: Floats = np.vecdot(x, x)[..., None]
    scale *= np.float32(1.0 / max(1, x.shape[-1]))
    scale += np.float32(eps)
    np.sqrt(scale, out=scale)
    normed = x / scale
    normed *= weight
    return normed


def silu_and_mul(x: Floats) -> Floats:
    """x [T, 2I], gate then up -> silu(gate) * up [T, I]."""
    half = x.shape[-1] // 2
    gate = x[:, :half]
    spread = np.negative(gate)
    np.exp(np.minimum(spread, LARGEST_EXPONENT, out=spread), out=spread)
    spread += ONE
    np.divide(gate, spread, out=spread)
    spread *= x[:, half:]
    return spread


def round_into_e4m3(x: Floats) -> Floats:
    """x [T, N], N a multiple of 128, rounded in place to what E4M3 with one scale a token and group
    would hold.
    """
    groups = x.reshape(x.shape[0], x.shape[1] // GROUP, GROUP)
    scales = np.maximum.reduce(np.abs(groups), axis=-1, keepdims=True, initial=TINY)
    scales /= E4M3_MAX
    groups /= scales
    magic = np.bitwise_and(groups.view(np.int32), EXPONENT_BITS).view(np.float32)
    magic *= ROUNDING
    np.maximum(magic, SMALLEST_ROUNDING, out=magic)
    groups += magic
    groups -= magic
    groups *= scales
    return x


def topk_sigmoid(
    logits: Floats,
    bias: Floats,
    k: int,
    groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Floats, NDArray[np.int64]]:
    """The gate of DeepSeek-V3, as ``routing.topk_sigmoid``: logits [T, E] -> weights [T, K], ids
    [T, K].
    """
    tokens, experts = logits.shape
    rows = np.arange(tokens)[:, None]
    scores = np.negative(logits)
    np.exp(np.minimum(scores, LARGEST_EXPONENT, out=scores), out=scores)
    scores += ONE
    np.divide(ONE, scores, out=scores)
    choice = scores + bias
    if topk_groups < groups:
        by_group = choice.reshape(tokens, groups, choice.shape[-1] // groups)
        best_two = by_group if by_group.shape[2] <= 2 else np.partition(by_group, -2)[..., -2:]
        left_out = groups - topk_groups
        by_group[
            rows, np.add.reduce(best_two, axis=-1).argpartition(left_out)[:, :left_out]
        ] = -np.inf
    ids = choice.argpartition(experts - k)[:, experts - k :]
    weights: Floats = scores[rows, ids]
    if renormalize:
        weights /= np.add.reduce(weights, axis=-1, keepdims=True) + np.float32(1e-20)
    weights *= np.float32(scale)
    return weights, ids


def row_keys(heads: int, nope: int, rope: int, size: int, value: int) -> int:
    """Up to how many keys :func:`attend_row` is for a layer of these sizes (H, N, P, C, V); 0: for
    none.
    """
    if size * max(nope, value) >= ONE_THREAD_VECTOR:
        return 0
    return (ONE_THREAD_MATRIX - 1) // max(1, heads * max(size, rope))


def attend_row(
    q_nope: Floats,
    q_rope: Floats,
    latent: Floats,
    rope: Floats,
    w_uk: Floats,
    w_uv: Floats,
    scale: float,
) -> Floats:
    """Absorbed latent attention (see ``mla``) of one row, whose last W of L keys are those of its
    few queries.

    q_nope [W, H, N], q_rope [W, H, P], latent [L, C], rope [L, P], w_uk [H, N, C], w_uv [H, C, V]
    -> [W, H * V].
    """
    q_latent = np.matmul(q_nope[:, :, None], w_uk)[:, :, 0]
    scores = np.matmul(q_latent, latent.T)
    scores += np.matmul(q_rope, rope.T)
    scores *= np.float32(scale)
    width = len(scores)
    keys = len(latent)
    for query in range(width - 1):
        scores[query, :, keys - width + 1 + query :] = -np.inf
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    attended: Floats = np.matmul(np.matmul(scores, latent)[:, :, None], w_uv).reshape(width, -1)
    return attended
