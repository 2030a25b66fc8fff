"""Joins the parts of a decode step's keys and takes the result to values, in one launch: for very few tokens."""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.triton import dependent

FEW = 2  #: tokens up to which one launch is quicker than two
COLUMNS = 16  #: of a head's values that a program makes


@triton.jit(do_not_specialize=["tokens", "pairs", "splits"])
def _merge_to_values(partial, lse, kv_lens, w, out, tokens, heads, pairs, splits, w_head, w_depth, w_column, out_token,
                     out_head, C: tl.constexpr, V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):
    """A program: ``BLOCK_V`` values of one head, of every token. The weights come in before it waits."""
    dependent.begin(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    c, v = tl.arange(0, BLOCK_C), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    s, i = tl.arange(0, BLOCK_S), tl.arange(0, CHUNK)
    weight = tl.load(w + head * w_head + c[None, :] * w_depth + v[:, None] * w_column,
                     mask=(c < C)[None, :] & (v < V)[:, None], other=0.0).to(tl.float32)
    dependent.wait(DEPENDENT)
    for token in range(tokens):
        pair = token * heads + head
        tiles = tl.cdiv(tl.load(kv_lens + pair // pairs), BLOCK_N)
        count = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, splits), 1))
        states = tl.load(lse + pair * splits + s, mask=s < count, other=float("-inf"))
        top = tl.max(states, axis=0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(states - top), axis=0)
        acc = tl.zeros([CHUNK, BLOCK_C], tl.float32)
        for first in range(0, count, CHUNK):
            at, filled = pair * splits + first + i, first + i < count
            share = tl.exp2(tl.load(lse + at, mask=filled, other=float("-inf")) - top)
            part = tl.load(partial + at[:, None] * C + c[None, :], mask=filled[:, None] & (c < C)[None, :], other=0.0)
            acc += part.to(tl.float32) * share[:, None]
        latent = tl.sum(acc, axis=0) / tl.where(total == 0.0, 1.0, total)
        value = tl.sum(weight * latent[None, :], axis=1)
        tl.store(out + token * out_token + head * out_head + v, value.to(out.dtype.element_ty), mask=v < V)


def merge_to_values(partial: Tensor, lse: Tensor, kv_lens: Tensor, w_uv: Tensor, out: Tensor, pairs: int,
                    block_n: int) -> None:
    """``merge`` and then times w_uv [H, C, V]: partial [T, H, S, C], lse float32 [T, H, S] -> out [T, H, V]."""
    tokens, heads, splits, size = partial.shape
    columns, padded = w_uv.shape[2], triton.next_power_of_2(splits)
    block = min(COLUMNS, triton.next_power_of_2(columns))
    if tokens:
        _merge_to_values[(heads, triton.cdiv(columns, block))](
            partial, lse, kv_lens, w_uv, out, tokens, heads, pairs, splits, *w_uv.stride(), *out.stride()[:2],
            C=size, V=columns, BLOCK_C=triton.next_power_of_2(size), BLOCK_V=block, BLOCK_N=block_n, BLOCK_S=padded,
            CHUNK=min(4, padded), num_warps=4, **dependent.options())
