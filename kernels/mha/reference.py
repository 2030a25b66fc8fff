"""Multi-head and grouped-query attention on plain tensors, with float64 references.

All functions are pure. Shapes: R rows, W queries per row, L keys per row, H query heads, K key
heads (H is a multiple of K), D head size, V value size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from glowplug.kernels.paged.seen_keys_reference import seen_keys

# NOTE: cuDNN's attention, torch's first choice for 16-bit types, is left out: it builds a plan for
# every new length, which takes 1 ms per layer and step.
CUDA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MAX_SCORES = 1 << 24  #: float32 scores held at once by ``partial_attention``


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor) -> Tensor:
    """Attend each row's queries to its keys, with a bias on the scores.

    Args:
        q: [R, W, H, D]
        k: [R, L, K, D]
        v: [R, L, K, V], all of one dtype
        scale: factor on the scores
        bias: [R, W, L] in q's dtype, added to the scores of every head: 0 where a query sees a key,
            -inf elsewhere; each query must see at least one key

    Returns:
        [R, W, H, V]
    """
    rows, width, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # NOTE: the queries of one key head become rows of its query matrix, so that keys need not be
    # repeated for each head of the group.
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
    """Attend q [R, W, H, D] to k [R, W, K, D] and v [R, W, K, V]; return [R, W, H, V].

    Query i of a row sees keys 0 to i of the row.
    """
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k = k.repeat_interleave(group, dim=2)
        v = v.repeat_interleave(group, dim=2)
    out = _sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, None)
    return out.transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Call scaled dot-product attention, causal without ``bias``.

    The head sizes [.., D] and [.., V] may differ.
    """
    dim = q.shape[-1]
    value_dim = v.shape[-1]
    if q.is_cuda and q.dtype != torch.float32:
        with sdpa_kernel(CUDA_BACKENDS):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale
            )
    # NOTE: torch's fused CPU kernel needs equal head sizes; padding the values is far cheaper than
    # the unfused fallback.
    if not q.is_cuda and value_dim < dim:
        v = pad(v, (0, dim - value_dim))
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale)
    return out[..., :value_dim]


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend one row's queries to one set of keys and return a state for ``merge_states``.

    With ``causal`` the last query sees all M keys, and each earlier query one key fewer (M >= N).
    Queries are processed in blocks of at most MAX_SCORES scores.

    Args:
        q: [N, H, D]
        k: [M, K, D]
        v: [M, K, V]
        scale: factor on the scores
        causal: mask later keys

    Returns:
        out float32 [N, H, V] and lse float32 [N, H]
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
    """Compute the attention of one row by the definition, in float64.

    The last query sees all keys, and each earlier query one key fewer.

    Args:
        q: [N, H, D]
        k: [M, K, D]
        v: [M, K, V]
        scale: factor on the scores

    Returns:
        float64 [N, H, V]
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
    tree_span: int = 0,
) -> Tensor:
    """Attend decoding rows to a paged cache by the definition, in float64.

    Query token i (0 to W - 1) of a row with L keys sees those at positions ``first_key`` to
    L - W + i, both included. With ``tree`` it sees all keys before the row's last S, and of these
    S keys it sees key j if bit j of ``tree[row, i]`` is set. A query that sees no key gives zeros.

    Args:
        query: [B * W, H, D]
        k_cache: [slots, K, D]
        v_cache: [slots, K, D]
        page_table: int32 [B, P]
        kv_lens: int32 [B]
        scale: factor on the scores
        page_size: slots per page
        first_key: position of the first visible key
        tree: int64 [B, W] or None
        tree_span: S, at most 64; 0: W

    Returns:
        float64 [B * W, H, D]
    """
    rows = len(kv_lens)
    heads = query.shape[1]
    width = query.shape[0] // rows
    group = heads // k_cache.shape[1]
    out = torch.zeros(*query.shape[:2], v_cache.shape[2], dtype=torch.float64, device=query.device)
    for row in range(rows):
        length = int(kv_lens[row])
        masks = None if tree is None else tree[row]
        for own in range(width):
            seen = seen_keys(length, width, own, first_key, masks, tree_span)
            if not seen:
                continue
            at = torch.tensor(seen, device=query.device)
            kv_slots = page_table[row].long()[at // page_size] * page_size + at % page_size
            key, value = (
                x[kv_slots].double().repeat_interleave(group, dim=1) for x in (k_cache, v_cache)
            )
            scores = scale * torch.einsum("hd,mhd->hm", query[row * width + own].double(), key)
            out[row * width + own] = torch.einsum(
                "hm,mhv->hv", torch.softmax(scores, dim=-1), value
            )
    return out
