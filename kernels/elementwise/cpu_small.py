"""Small kernels in numpy for a few float32 tokens in host memory.

A decode step of a small model on the CPU spends more time on calls than on arithmetic, and a numpy
call costs a third of a torch call. x is float32 [T, N], contiguous in its last dimension; results
are new arrays unless the name contains "into". Matrix multiplications stay below the size from
which OpenBLAS wakes threads of its own, which torch's thread count does not limit.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.kernels.formats.fp8_block import FP8_BLOCK

Floats: TypeAlias = NDArray[np.float32]

FEW_ELEMENTS_MAX = 1 << 14  #: elements of x up to which these kernels are faster than torch
TINY = 1e-10  #: smallest absolute maximum of a group, as in the published activation kernel
E4M3_MAX = np.float32(448.0)
EXPONENT_BITS = np.int32(0x7F800000)  #: exponent mask of a float32
#: factor on a number's power of two; adding the result keeps 3 of the 23 mantissa bits
ROUNDING = np.float32(1.5 * 2.0**20)
#: ROUNDING times 2^-6: below 2^-6 the numbers of E4M3 are 2^-9 apart
SMALLEST_ROUNDING = np.float32(1.5 * 2.0**14)
ONE = np.float32(1.0)
#: elements of a matrix below which OpenBLAS multiplies a vector by it in one thread
ONE_THREAD_VECTOR = 9216
#: multiplications below which OpenBLAS runs a matrix multiplication in one thread
ONE_THREAD_MATRIX = 1 << 18
ROW_QUERIES = 8  #: queries of a row up to which ``attend_row`` is used
LARGEST_EXPONENT = np.float32(88.0)  #: exp of larger numbers overflows float32


def is_few(x: Tensor) -> bool:
    """Return whether ``x`` is float32, in host memory and small enough for these kernels."""
    return x.dtype is torch.float32 and x.is_cpu and 0 < x.numel() <= FEW_ELEMENTS_MAX


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return x / sqrt(mean(x^2) + eps) * weight; weight is [N]."""
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
    """Return silu(gate) * up [T, I] for x [T, 2I], gate first."""
    half = x.shape[-1] // 2
    gate = x[:, :half]
    spread = np.negative(gate)
    np.exp(np.minimum(spread, LARGEST_EXPONENT, out=spread), out=spread)
    spread += ONE
    np.divide(gate, spread, out=spread)
    spread *= x[:, half:]
    return spread


def round_into_e4m3(x: Floats) -> Floats:
    """Round x in place to the values of E4M3 with one scale per token and group, and return x.

    x is [T, N]; N must be a multiple of 128.
    """
    groups = x.reshape(x.shape[0], x.shape[1] // FP8_BLOCK, FP8_BLOCK)
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
    """Compute the gate of DeepSeek-V3 as ``kernels.moe.route_reference.topk_sigmoid`` does.

    Args:
        logits: [T, E]
        bias: [E], added to the scores for the choice only
        k: experts chosen for a token
        groups: equal groups of experts
        topk_groups: groups from which experts are chosen
        renormalize: divide the weights of a token by their sum
        scale: factor on the weights

    Returns:
        weights float32 [T, k] and ids int64 [T, k]
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
    """Return the number of keys up to which a row is computed by :func:`attend_row`; 0: never.

    Args:
        heads: H
        nope: N
        rope: P
        size: C
        value: V
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
    hidden: NDArray[np.bool_] | None = None,
) -> Floats:
    """Run absorbed latent attention (see ``kernels.mla.reference``) for one row.

    The last W of the L keys belong to the row's few queries. Without ``hidden`` a query sees its
    own key and those before it.

    Args:
        q_nope: [W, H, N]
        q_rope: [W, H, P]
        latent: [L, C]
        rope: [L, P]
        w_uk: [H, N, C]
        w_uv: [H, C, V]
        scale: factor on the scores
        hidden: [W, n], True: the query does not see that key of the last n; all keys before them
            are seen

    Returns:
        [W, H * V]
    """
    q_latent = np.matmul(q_nope[:, :, None], w_uk)[:, :, 0]
    scores = np.matmul(q_latent, latent.T)
    scores += np.matmul(q_rope, rope.T)
    scores *= np.float32(scale)
    _hide(scores, hidden)
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    attended: Floats = np.matmul(np.matmul(scores, latent)[:, :, None], w_uv)
    return attended.reshape(len(scores), -1)


def _hide(scores: Floats, hidden: NDArray[np.bool_] | None) -> None:
    """Set the scores [W, H, L] of keys that queries do not see to -inf; see :func:`attend_row`."""
    width, _, keys = scores.shape
    if hidden is not None:
        np.copyto(scores[:, :, keys - hidden.shape[1] :], -np.inf, where=hidden[:, None])
        return
    for query in range(width - 1):
        scores[query, :, keys - width + 1 + query :] = -np.inf
