"""Multi-head and grouped-query attention on plain tensors. Pure functions; references in float64
beside them.

R rows, W queries a row, L keys a row, H query heads, K key heads (H a multiple of K), D head size,
V value size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

# NOTE: cuDNN's attention, first choice for 16-bit types, builds a plan for every new length: 1 ms a
# layer and step.
CUDA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MAX_SCORES = 1 << 24  #: float32 scores that ``partial_attention`` keeps at once


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor) -> Tensor:
    """q [R, W, H, D], k [R, L, K, D], v [R, L, K, V] -> [R, W, H, V], all of one dtype.

    ``bias`` [R, W, L], of q's dtype, is added to every head's scores: 0 where a query sees a key,
    -inf elsewhere; each query must see at least one.
    """
    rows, width, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # NOTE: queries of one key head become rows of its query matrix, so that keys are never repeated
    # for their group.
    folded = (
        q.view(rows, width, kv_heads, group, dim)
        .transpose(1, 2)
        .reshape(rows, kv_heads, width * group, dim)
    )
    if group > 1 and width > 1:
        bias = bias.repeat_interleave(group, dim=1)
    out = _sdpa(folded, k.transpose(1, 2), v.transpose(1, 2), scale, bias.unsqueeze(1))
    out = out.view(rows, kv_heads, width, group, -1).transpose(1, 2)
    return out.reshape(rows, width, heads, out.shape[-1])


def attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [R, W, H, D], k [R, W, K, D], v [R, W, K, V] -> [R, W, H, V]: query i of a row sees keys 0
    to i of it.
    """
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k = k.repeat_interleave(group, dim=2)
        v = v.repeat_interleave(group, dim=2)
    out = _sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, None)
    return out.transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Scaled dot-product attention, causal without ``bias``. [.., D] and [.., V] may differ."""
    dim = q.shape[-1]
    value_dim = v.shape[-1]
    if q.is_cuda and q.dtype != torch.float32:
        with sdpa_kernel(CUDA_BACKENDS):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale
            )
    # NOTE: torch's fused CPU kernel needs equal head sizes; padding the values is far cheaper than
    # its fallback.
    if not q.is_cuda and value_dim < dim:
        v = pad(v, (0, dim - value_dim))
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale)
    return out[..., :value_dim]


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """One row's queries over one set of keys, as a partial state for ``merge_states``.

    q [N, H, D], k [M, K, D], v [M, K, V] -> out float32 [N, H, V], lse float32 [N, H]. With
    ``causal`` the last query sees every key and each query before it one key less (M >= N). Queries
    go in blocks of at most MAX_SCORES scores.
    """
    count, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    folded = q.float().view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    k_cols = k.float().permute(1, 2, 0).unsqueeze(1)
    v_rows = v.float().transpose(0, 1).unsqueeze(1)
    out = q.new_empty(count, heads, v.shape[-1], dtype=torch.float32)
    lse = q.new_empty(count, heads, dtype=torch.float32)
    block = max(1, MAX_SCORES // (heads * keys))
    columns = torch.arange(keys, device=q.device)
    for start in range(0, count, block):
        end = min(start + block, count)
        scores = torch.matmul(folded[:, :, start:end] * scale, k_cols)
        if causal:
            last_seen = torch.arange(start, end, device=q.device) + (keys - count)
            scores.masked_fill_(columns > last_seen.unsqueeze(1), float("-inf"))
        total = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores.sub_(total.unsqueeze(-1)))
        part = torch.matmul(weights, v_rows)
        out[start:end] = part.permute(2, 0, 1, 3).reshape(end - start, heads, -1)
        lse[start:end] = total.permute(2, 0, 1).reshape(end - start, heads)
    return out, lse


def mha_reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One row by the definition, in float64: q [N, H, D], k [M, K, D], v [M, K, V] -> [N, H, V],
    causal at the end.
    """
    count, heads, _ = q.shape
    keys, kv_heads, _ = k.shape
    out = torch.zeros(count, heads, v.shape[-1], dtype=torch.float64, device=q.device)
    for head in range(heads):
        key_head = head * kv_heads // heads
        for i in range(count):
            seen = keys - count + i + 1
            scores = scale * (k[:seen, key_head].double() @ q[i, head].double())
            out[i, head] = torch.softmax(scores, dim=0) @ v[:seen, key_head].double()
    return out


def paged_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    first_key: int = 0,
    tree: Tensor | None = None,
) -> Tensor:
    """Decoding rows over a paged cache by the definition, in float64: query [B * W, H, D], caches
    [slots, K, D], page_table int32 [B, P], kv_lens int32 [B] -> [B * W, H, D].

    Query token i of a row sees the keys from ``first_key`` to the row's last but W - 1 - i, or with
    ``tree`` int64 [B, W] those before the row's W own tokens, and own token j where bit j is set.
    Zeros where it sees none.
    """
    rows = len(kv_lens)
    heads = query.shape[1]
    width = query.shape[0] // rows
    group = heads // k_cache.shape[1]
    out = torch.zeros(*query.shape[:2], v_cache.shape[2], dtype=torch.float64, device=query.device)
    for row in range(rows):
        length = int(kv_lens[row])
        begin = length - width
        for own in range(width):
            seen = [
                p
                for p in range(first_key, length)
                if (
                    p <= begin + own
                    if tree is None or p < begin
                    else int(tree[row, own]) >> (p - begin) & 1
                )
            ]
            if not seen:
                continue
            at = torch.tensor(seen, device=query.device)
            slots = page_table[row].long()[at // page_size] * page_size + at % page_size
            key, value = (
                x[slots].double().repeat_interleave(group, dim=1) for x in (k_cache, v_cache)
            )
            scores = scale * torch.einsum("hd,mhd->hm", query[row * width + own].double(), key)
            out[row * width + own] = torch.einsum(
                "hm,mhv->hv", torch.softmax(scores, dim=-1), value
            )
    return out
