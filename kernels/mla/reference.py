"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) on plain tensors.

Pure functions, with a float64 reference for each kind of attention.

Shapes: R rows, W queries per row, L keys per row, H heads, C latent size, P rope size, N nope size,
V value size. The key of a head is ``[W_UK latent, rope]`` and its value ``W_UV latent``. Absorbed,
W_UK is applied to the query and W_UV to the output, so that attention reads the cache directly: one
key head of size C + P whose first C numbers are also the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.elementwise.norm_reference import rms_norm_reference
from glowplug.kernels.elementwise.rope_reference import rotate_reference
from glowplug.kernels.formats.fp8 import E4M3_MAX, Blocks, dequantize_weight
from glowplug.kernels.paged.seen_keys_reference import seen_keys


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Multiply q_nope [T, H, N] by w_uk [H, N, C] and return [T, H, C]."""
    return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


def project_output(out_latent: Tensor, w_uv: Tensor) -> Tensor:
    """Multiply out_latent [T, H, C] by w_uv [H, C, V] and return [T, H * V]."""
    out = torch.bmm(out_latent.transpose(0, 1), w_uv).transpose(0, 1)
    return out.reshape(out_latent.shape[0], -1)


def attend_latent(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, scale: float, bias: Tensor
) -> Tensor:
    """Attend absorbed queries to latents. Scores and softmax are float32.

    Args:
        q_latent: [R, W, H, C]
        q_rope: [R, W, H, P]
        latent: [R, L, C]
        rope: [R, L, P]
        scale: factor on the scores
        bias: float32 [R, W, L]: 0 where a query sees a key, -inf elsewhere

    Returns:
        [R, W, H, C]
    """
    rows, width, heads, size = q_latent.shape
    if width > 1:
        bias = bias.repeat_interleave(heads, dim=1)
    q_latent = q_latent.reshape(rows, width * heads, size)
    q_rope = q_rope.reshape(rows, width * heads, -1)
    scores = torch.baddbmm(bias, q_latent.float(), latent.float().transpose(1, 2), alpha=scale)
    scores = scores.baddbmm_(q_rope.float(), rope.float().transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, dim=-1).to(latent.dtype)
    return torch.bmm(weights, latent).view(rows, width, heads, size)


def mla_reference(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
) -> Tensor:
    """Compute the attention of one row by the definition, un-absorbed, in float64.

    The last query sees all M keys, and each earlier query one key fewer.

    Args:
        q_nope: [T, H, N]
        q_rope: [T, H, P]
        latent: [M, C]
        rope: [M, P]
        w_uk: [H, N, C]
        w_uv: [H, C, V]
        scale: factor on the scores

    Returns:
        float64 [T, H, V]
    """
    count = q_nope.shape[0]
    keys = latent.shape[0]
    k_nope = torch.einsum("mc,hnc->mhn", latent.double(), w_uk.double())
    value = torch.einsum("mc,hcv->mhv", latent.double(), w_uv.double())
    scores = torch.einsum("thn,mhn->htm", q_nope.double(), k_nope)
    scores = (scores + torch.einsum("thp,mp->htm", q_rope.double(), rope.double())) * scale
    last_seen = torch.arange(count, device=latent.device) + (keys - count)
    hidden = torch.arange(keys, device=latent.device) > last_seen.unsqueeze(1)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("htm,mhv->thv", weights, value)


def prologue(
    query: Tensor,
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    kv_slots: Tensor,
    absorbed: Tensor,
    own: Tensor,
    w_uk: Tensor,
    leads: bool = False,
    stored: Blocks | None = None,
) -> None:
    """Turn the projections of a step into the inputs of attention.

    The first D of the T tokens belong to decoding rows. The latent is normalised and the rotary
    part of the key is rotated into ``cache``, and also into ``own`` for the tokens after the first
    D. ``absorbed`` receives the query multiplied by ``w_uk``, followed by the rotated rotary part;
    for the tokens after the first D the rotated part is written back to ``query``.

    Args:
        query: [T, H, N + P]
        compressed: [T, C + P]
        norm_weight: [C]
        eps: epsilon of the norm
        cos_sin: float32 [T, P]
        interleaved: rotate neighbouring elements
        cache: [slots, C + P], written at ``kv_slots``
        kv_slots: int64 [T]
        absorbed: [D, H, C + P], written
        own: [T - D, C + P], written
        w_uk: [H, N, C]
        leads: not used here; see ``kernels.mla.prologue.prologue``
        stored: FP8 blocks to multiply by instead of ``w_uk``, which they equal up to rounding
    """
    lora = norm_weight.shape[0]
    decode = absorbed.shape[0]
    rope = compressed.shape[1] - lora
    latent = rms_norm_reference(compressed[:, :lora], norm_weight, eps)
    k_rope = rotate_reference(compressed[:, None, lora:], cos_sin, interleaved)[:, 0]
    store(latent, k_rope, cache, kv_slots)
    own.copy_(torch.cat((latent, k_rope), dim=-1)[decode:])
    turned = rotate_reference(query[..., -rope:], cos_sin, interleaved)
    absorbed[..., lora:] = turned[:decode]
    query[decode:, :, -rope:] = turned[decode:]
    absorb(
        query[:decode, :, :-rope],
        w_uk if stored is None else dequantize_weight(*stored, w_uk.dtype),
        absorbed,
    )


def absorb(q_nope: Tensor, w_uk: Tensor, absorbed: Tensor) -> None:
    """Multiply q_nope [T, H, N] by w_uk [H, N, C] into absorbed[..., :C].

    Args:
        q_nope: [T, H, N]
        w_uk: [H, N, C]
        absorbed: [T, H, C + P]; only the first C columns are written
    """
    torch.bmm(q_nope.transpose(0, 1), w_uk, out=absorbed[..., : w_uk.shape[2]].transpose(0, 1))


def project(
    latent: Tensor, w_uv: Tensor, out: Tensor, follows: bool = False, stored: Blocks | None = None
) -> None:
    """Multiply latent [T, H, C] by w_uv [H, C, V] into out [T, H, V].

    ``stored`` as in :func:`prologue`. ``follows`` is not used here; see
    ``kernels.mla.head_gemms.project``.
    """
    weight = w_uv if stored is None else dequantize_weight(*stored, w_uv.dtype)
    torch.bmm(latent.transpose(0, 1), weight, out=out.transpose(0, 1))


def store(latent: Tensor, k_rope: Tensor, cache: Tensor, kv_slots: Tensor) -> None:
    """Write latent [T, C] and k_rope [T, P] to cache [slots, C + P] at kv_slots int64 [T].

    An FP8 cache saturates.
    """
    entry = torch.cat((latent, k_rope), dim=-1)
    if cache.dtype is torch.float8_e4m3fn:
        cache.view(torch.uint8).index_copy_(
            0, kv_slots, entry.float().clamp(-448, 448).to(cache.dtype).view(torch.uint8)
        )
    else:
        cache.index_copy_(0, kv_slots, entry.to(cache.dtype))


def in_e4m3(query: Tensor) -> Tensor:
    """Convert absorbed queries [T, H, C + P] to E4M3, for kernels that multiply in E4M3.

    The conversion uses no scale, as for cache entries. Values beyond 448 saturate; NaN stays.
    """
    return query.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def gather(cache: Tensor, kv_slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the entries kv_slots int32 [K] of cache [slots, C + P] as [K, C + P] in ``dtype``."""
    if cache.dtype is torch.float8_e4m3fn:
        return cache.view(torch.uint8).index_select(0, kv_slots).view(cache.dtype).to(dtype)
    return cache.index_select(0, kv_slots).to(dtype)


def expand(entries: Tensor, w_kv: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Expand cache entries to the keys and values of every head.

    Args:
        entries: [n, C + P]
        w_kv: [H, N + V, C]; the first ``nope`` rows of a head are W_UK
        nope: N

    Returns:
        keys [n, H, N + P] and values [n, H, V]
    """
    heads, rows, lora = w_kv.shape
    k_nope, v = (
        entries[:, :lora]
        .mm(w_kv.flatten(0, 1).t())
        .view(-1, heads, rows)
        .split([nope, rows - nope], dim=-1)
    )
    return torch.cat((k_nope, entries[:, None, lora:].expand(-1, heads, -1)), dim=-1), v


def paged_latent_reference(
    query: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    lora: int,
    first_key: int = 0,
    tree: Tensor | None = None,
    tree_span: int = 0,
) -> Tensor:
    """Attend absorbed queries to a paged cache, row by row in float64.

    The last query of a row sees its keys from ``first_key`` on, and each earlier query one key
    fewer. A query that sees no key gives zeros.

    Args:
        query: [B * W, H, C + P]
        kv: the cache [slots, C + P]
        page_table: int [B, pages]
        kv_lens: int [B]
        scale: factor on the scores
        page_size: slots per page
        lora: C
        first_key: position of the first visible key
        tree: int64 [B, W]: bit j set means that the query sees key j of the row's last S keys
        tree_span: S, at most 64; 0: W

    Returns:
        float64 [B * W, H, C]
    """
    rows = kv_lens.shape[0]
    (tokens, heads, _) = query.shape
    width = tokens // rows
    out = torch.zeros(tokens, heads, lora, dtype=torch.float64, device=query.device)
    for row in range(rows):
        pages, length = page_table[row].long(), int(kv_lens[row])
        masks = None if tree is None else tree[row]
        for token in range(width):
            seen = seen_keys(length, width, token, first_key, masks, tree_span)
            if seen:
                at = torch.tensor(seen, device=query.device)
                keys = kv[pages[at // page_size] * page_size + at % page_size].double()
                index = row * width + token
                weights = torch.softmax(query[index].double() @ keys.T * scale, dim=-1)
                out[index] = weights @ keys[:, :lora]
    return out


def ragged_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: list[int],
    k_lens: list[int],
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attend the queries of each row to its own keys, in float64.

    With ``causal`` the last query of a row sees all its keys, and each earlier query one key fewer.
    A query that sees no key gives zeros and -inf.

    Args:
        q: [n, H, D]
        k: [m, H, D]
        v: [m, H, V]
        q_lens: queries of each row
        k_lens: keys of each row
        scale: factor on the scores
        causal: mask later keys

    Returns:
        out [n, H, V] and lse [n, H]
    """
    outs = []
    lses = []
    for queries, keys, values in zip(
        q.double().split(q_lens), k.double().split(k_lens), v.double().split(k_lens)
    ):
        scores = torch.einsum("thd,mhd->thm", queries, keys) * scale
        if causal:
            last = torch.arange(len(queries), device=q.device) + (len(keys) - len(queries))
            hidden = torch.arange(len(keys), device=q.device) > last.unsqueeze(1)
            scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
        outs.append(torch.einsum("thm,mhv->thv", weights, values))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
