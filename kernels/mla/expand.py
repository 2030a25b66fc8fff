"""Latents expanded to each head's keys and values for prefill: a product by heads writes between
the columns of the rotary part, which one launch hands to every head, so that no key is copied.

The reference is ``kernels.mla.expand``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

ROWS = 64  #: (token, head) pairs of a program


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
    """keys[token, every head] = rotary[token], for ``count`` pairs of token and head."""
    dependent.wait(DEPENDENT)
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


def spread(rotary: Tensor, keys: Tensor) -> None:
    """rotary [n, P] into keys [n, H, P]; the last dimension of both is contiguous."""
    tokens, heads, size = keys.shape
    _spread[(cdiv(tokens * heads, ROWS),)](
        rotary,
        keys,
        tokens * heads,
        heads,
        rotary.stride(0),
        keys.stride(0),
        keys.stride(1),
        SIZE=size,
        BLOCK=next_power_of_2(size),
        ROWS=ROWS,
        **dependent.options(),
    )


def expand(entries: Tensor, w_kv: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """As ``kernels.mla.expand``. Where keys' latent parts and values are of one size, both are
    views of one tensor in which they alternate, values as wide as keys, and one product fills
    it."""
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
        spread(entries[:, lora:], k[..., nope:])
        for weight, out in parts:
            torch.bmm(
                entries[:, :lora].expand(len(weight), -1, -1),
                weight.transpose(1, 2),
                out=out.transpose(0, 1),
            )
    return k, v
