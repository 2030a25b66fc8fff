"""Expansion of latents to the keys and values of each head, for MLA prefill.

One launch writes the rotary part to every head's key; a batched GEMM by heads writes the other
columns. No key is copied. The reference is ``kernels.mla.reference.expand``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

PAIRS_PER_PROGRAM = 64  #: (token, head) pairs of one program


@triton.jit(do_not_specialize=["count", "heads"])
def _spread(
    rotary,
    keys,
    count,
    heads,
    rotary_token,
    keys_token,
    keys_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Set keys[token, head] = rotary[token] for ``count`` (token, head) pairs."""
    dependent_launch.wait(DEPENDENT)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (pair // heads).to(tl.int64), pair % heads
    column = tl.arange(0, BLOCK)
    inside = (pair < count)[:, None] & (column < SIZE)[None, :]
    value = tl.load(
        rotary + (token * rotary_token)[:, None] + column[None, :], mask=inside, other=0.0
    )
    tl.store(
        keys + (token * keys_token + head * keys_head)[:, None] + column[None, :],
        value,
        mask=inside,
    )


def copy_rotary(rotary: Tensor, keys: Tensor) -> None:
    """Copy rotary [n, P] to every head of keys [n, H, P].

    The last dimension of both tensors must be contiguous.
    """
    tokens, heads, size = keys.shape
    _spread[(cdiv(tokens * heads, PAIRS_PER_PROGRAM),)](
        rotary,
        keys,
        tokens * heads,
        heads,
        rotary.stride(0),
        keys.stride(0),
        keys.stride(1),
        SIZE=size,
        BLOCK=next_power_of_2(size),
        ROWS=PAIRS_PER_PROGRAM,
        **dependent_launch.options(),
    )


def expand(entries: Tensor, w_kv: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Expand cache entries to the keys and values of every head.

    If V equals N, keys and values are views of one tensor [n, 2H, N + P] in which they alternate by
    head, so that one batched GEMM fills both. The reference is ``kernels.mla.reference.expand``.

    Args:
        entries: [n, C + P]
        w_kv: [H, N + V, C]; the first ``nope`` rows of a head are W_UK
        nope: N

    Returns:
        keys [n, H, N + P] and values [n, H, V]
    """
    (tokens, size) = entries.shape
    (heads, rows, lora) = w_kv.shape
    whole = nope + size - lora
    if rows == 2 * nope:
        both = entries.new_empty(tokens, 2 * heads, whole)
        k = both[:, ::2]
        v = both[:, 1::2, :nope]
        parts = [(w_kv.view(2 * heads, nope, lora), both[..., :nope])]
    else:
        k = entries.new_empty(tokens, heads, whole)
        v = entries.new_empty(tokens, heads, rows - nope)
        parts = [(w_kv[:, :nope], k[..., :nope]), (w_kv[:, nope:], v)]
    if tokens:
        copy_rotary(entries[:, lora:], k[..., nope:])
        for weight, out in parts:
            torch.bmm(
                entries[:, :lora].expand(len(weight), -1, -1),
                weight.transpose(1, 2),
                out=out.transpose(0, 1),
            )
    return k, v
