"""sgl_kernel's FlashMLA and FlashAttention-3 in plain torch on the CPU, with the argument checks of
0.4.2.

Over an FP8 cache FlashMLA multiplies E4M3 as its kernel does: the softmax's weights are rounded
below the row's largest one after their sum is taken, and the result is bfloat16. A schedule records
the lengths that it was made for.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from glowplug.kernels.mha.reference import partial_attention

FP8, PAGE, LATENT, KEY = torch.float8_e4m3fn, 64, 512, 576
CALLS: list[dict[str, Any]] = []  #: arguments of each call of ``flash_mla_with_kvcache``


def get_mla_metadata(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous() and num_heads_k == 1
    assert not is_fp8_kvcache or len(cache_seqlens) < 4096, "the library ends the process"
    metadata = torch.tensor(
        [[num_q_tokens_per_head_k, int(is_fp8_kvcache), 0, 0, 0, 0, 0, 0]], dtype=torch.int32
    )
    return metadata, _splits(cache_seqlens)


def _splits(lens: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    softmax_scale: float,
    causal: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    is_fp8_kvcache: bool = False,
) -> tuple[Tensor, Tensor]:
    rows, width, heads, size = q.shape
    assert (
        q.dtype == k_cache.dtype
        and k_cache.shape[1:] == (PAGE, 1, KEY)
        and (size, head_dim_v) == (KEY, LATENT)
    )
    assert (
        block_table.dtype == cache_seqlens.dtype == torch.int32
        and len(block_table) == len(cache_seqlens) == rows
    )
    assert tile_scheduler_metadata[0].tolist()[:2] == [width * heads, int(q.dtype == FP8)]
    assert torch.equal(num_splits, _splits(cache_seqlens)), "the schedule was made for another step"
    if q.dtype == FP8:
        for descale in (descale_q, descale_k):
            assert descale is not None and descale.dtype == torch.float32 and descale.shape == (1,)
        assert bool((cache_seqlens > 0).all()), (
            "a length of 0 would read the page before the first one"
        )
    CALLS.append(
        {"q": q, "descale_q": descale_q, "descale_k": descale_k, "lens": cache_seqlens.clone()}
    )
    scale_q, scale_k = (
        1.0 if descale is None else float(descale) for descale in (descale_q, descale_k)
    )
    out = torch.zeros(rows, width, heads, head_dim_v, dtype=torch.float64)
    for row in range(rows):
        length = int(cache_seqlens[row])
        if not length:
            continue
        keys = (
            k_cache[block_table[row, : -(-length // PAGE)].long(), :, 0]
            .double()
            .flatten(0, 1)[:length]
        )
        scores = torch.einsum("whc,kc->whk", q[row].double(), keys) * (
            softmax_scale * scale_q * scale_k
        )
        if causal:
            hidden = torch.arange(length) > torch.arange(width)[:, None] + (length - width)
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0.0))
        total = weights.sum(-1, keepdim=True).clamp(min=1e-30)
        if q.dtype == FP8:
            weights = weights.float().to(FP8).double()
        out[row] = torch.einsum("whk,kc->whc", weights, keys[:, :head_dim_v] * scale_k) / total
    return out.to(torch.bfloat16 if q.dtype == FP8 else q.dtype), torch.empty(0)


def flash_attn_with_kvcache(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qv: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    assert q.dtype == k_cache.dtype == v_cache.dtype, "query and key must have the same dtype"
    query, out = torch.cat((qv, q), -1), torch.zeros_like(qv)
    for row, length in enumerate(cache_seqlens.tolist()):
        if length:
            pages = page_table[row, : -(-length // k_cache.shape[1])].long()
            keys = torch.cat((v_cache[pages], k_cache[pages]), -1).flatten(0, 1)[:length]
            out[row] = partial_attention(
                query[row], keys, keys[..., : qv.shape[-1]], softmax_scale, causal
            )[0]
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    assert q.dtype == k.dtype == v.dtype and return_softmax_lse
    queries, keys, lses = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), []
    for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False):
        out[a:b], lse = partial_attention(q[a:b], k[c:d], v[c:d], softmax_scale, causal)
        lses.append(lse)
    return out, torch.cat(lses).t()


def modules() -> dict[str, ModuleType]:
    """Return the stand-ins for the package's modules in ``sys.modules``."""
    package, mla, attn = (
        ModuleType(name) for name in ("sgl_kernel", "sgl_kernel.flash_mla", "sgl_kernel.flash_attn")
    )
    mla.__dict__.update(
        get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache
    )
    attn.__dict__.update(
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_attn_varlen_func,
    )
    package.__dict__.update(flash_mla=mla, flash_attn=attn)
    return {made.__name__: made for made in (package, mla, attn)}
