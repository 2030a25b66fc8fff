"""Writes of a step's keys and values to the paged cache, in the dtype of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import next_power_of_2

#: largest finite number of each FP8 format
FP8_MAX = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
}


@triton.jit
def _copy(source, target, inside, at, MOST: tl.constexpr):
    """Copy the elements ``at`` of source to target.

    If MOST > 0 (FP8), values are clamped to it, because the hardware conversion alone might not
    saturate.
    """
    value = tl.load(source + at, mask=inside, other=0.0)
    if MOST > 0:
        value = tl.clamp(value.to(tl.float32), -MOST, MOST)
    tl.store(target + at, value.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["kv_slots"])
def mha_store_kernel(
    k,
    v,
    k_cache,
    v_cache,
    kv_slots,
    k_token,
    v_token,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Write one token's keys and values, ``SIZE`` numbers each, to its KV slot."""
    dependent_launch.begin(LEADS)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    dependent_launch.wait(DEPENDENT)
    slot = tl.load(kv_slots + token)
    _copy(k + token * k_token, k_cache + slot * SIZE, inside, at, MOST)
    _copy(v + token * v_token, v_cache + slot * SIZE, inside, at, MOST)


def mha_store(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots: Tensor, follows: bool
) -> None:
    """Write k and v [T, K, D] to ``kv_slots`` int64 [T] of the caches [slots, K, D].

    Tokens may be strided.

    Args:
        follows: the next kernel waits for this one (see ``dependent_launch``), so it may start
            early
    """
    tokens, heads, dim = k.shape
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    k, v = (x if x[0:1].is_contiguous() else x.contiguous() for x in (k, v))
    if tokens:
        options = dependent_launch.options()
        mha_store_kernel[(tokens,)](
            k,
            v,
            k_cache,
            v_cache,
            kv_slots,
            k.stride(0),
            v.stride(0),
            SIZE=heads * dim,
            BLOCK=next_power_of_2(heads * dim),
            MOST=FP8_MAX.get(k_cache.dtype, 0.0),
            LEADS=follows and options["DEPENDENT"],
            **options,
        )
