"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) on plain tensors. Pure functions,
reference beside them.

R rows, W queries a row, L keys a row, H heads, C latent size, P rope size, N nope size, V value
size. A head's key is ``[W_UK latent, rope]`` and its value ``W_UV latent``; absorbed, W_UK moves to
the query and W_UV to the output, so that
the cache is read as it lies: one key head of size C + P whose first C numbers are also the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.elementwise.norm_reference import rms_norm_reference
from glowplug.kernels.elementwise.rope_reference import rotate_reference
from glowplug.kernels.formats.fp8 import E4M3_MAX, Blocks, dequantize_weight


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """q_nope [T, H, N], w_uk [H, N, C] -> [T, H, C]."""
    return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


def project_output(out_latent: Tensor, w_uv: Tensor) -> Tensor:
    """out_latent [T, H, C], w_uv [H, C, V] -> [T, H * V]."""
    out = torch.bmm(out_latent.transpose(0, 1), w_uv).transpose(0, 1)
    return out.reshape(out_latent.shape[0], -1)


def attend_latent(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, scale: float, bias: Tensor
) -> Tensor:
    """q_latent [R, W, H, C], q_rope [R, W, H, P], latent [R, L, C], rope [R, L, P] -> [R, W, H, C].

    ``bias`` float32 [R, W, L]: 0 where a query sees a key, -inf elsewhere. Scores and softmax are
    float32.
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
    """One row by the definition, un-absorbed, in float64.

    q_nope [T, H, N], q_rope [T, H, P], latent [M, C], rope [M, P], w_uk [H, N, C], w_uv [H, C, V]
    -> [T, H, V]; the last query sees all M keys, each one before it one less.
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
    slots: Tensor,
    absorbed: Tensor,
    own: Tensor,
    w_uk: Tensor,
    leads: bool = False,
    stored: Blocks | None = None,
) -> None:
    """From a step's projections to what attention reads. T tokens, of which the first D are those
    of decoding rows.

    query [T, H, N + P], compressed [T, C + P], norm_weight [C], cos_sin float32 [T, P], cache
    [slots, C + P], slots int64 [T], absorbed [D, H, C + P], own [T - D, C + P]. The latent is
    normed and the key's rotary part rotated into ``cache``, and into ``own`` for the tokens behind
    D. ``absorbed`` gets the query times w_uk [H, N, C], then its rotary part, rotated; for the
    tokens behind D that goes back into ``query``. ``leads`` is of the kernel's. With ``stored``
    that is multiplied instead of w_uk, which it gives up to rounding.
    """
    lora = norm_weight.shape[0]
    decode = absorbed.shape[0]
    rope = compressed.shape[1] - lora
    latent = rms_norm_reference(compressed[:, :lora], norm_weight, eps)
    k_rope = rotate_reference(compressed[:, None, lora:], cos_sin, interleaved)[:, 0]
    store(latent, k_rope, cache, slots)
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
    """q_nope [T, H, N] times w_uk [H, N, C] into the first C of ``absorbed`` [T, H, C + P]."""
    torch.bmm(q_nope.transpose(0, 1), w_uk, out=absorbed[..., : w_uk.shape[2]].transpose(0, 1))


def project(
    latent: Tensor, w_uv: Tensor, out: Tensor, follows: bool = False, stored: Blocks | None = None
) -> None:
    """latent [T, H, C] times w_uv [H, C, V] into out [T, H, V]. ``follows`` is of the kernel's;
    ``stored`` as in ``prologue``."""
    weight = w_uv if stored is None else dequantize_weight(*stored, w_uv.dtype)
    torch.bmm(latent.transpose(0, 1), weight, out=out.transpose(0, 1))


def store(latent: Tensor, k_rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    """latent [T, C] and k_rope [T, P] into cache [slots, C + P] at slots int64 [T]; FP8 saturates."""
    entry = torch.cat((latent, k_rope), dim=-1)
    if cache.dtype is torch.float8_e4m3fn:
        cache.view(torch.uint8).index_copy_(
            0, slots, entry.float().clamp(-448, 448).to(cache.dtype).view(torch.uint8)
        )
    else:
        cache.index_copy_(0, slots, entry.to(cache.dtype))


def in_e4m3(query: Tensor) -> Tensor:
    """Absorbed queries [T, H, C + P] as kernels read them that multiply in E4M3: without a scale,
    as entries of the cache are. Beyond 448 it saturates; NaN stays."""
    return query.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows int32 [K] of cache [slots, C + P] -> [K, C + P] in ``dtype``."""
    if cache.dtype is torch.float8_e4m3fn:
        return cache.view(torch.uint8).index_select(0, slots).view(cache.dtype).to(dtype)
    return cache.index_select(0, slots).to(dtype)


def expand(entries: Tensor, w_kv: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Cache entries [n, C + P] by w_kv [H, N + V, C], of which the first ``nope`` rows of a head
    are W_UK -> keys [n, H, N + P] and values [n, H, V]."""
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
) -> Tensor:
    """Absorbed queries [B * W, H, C + P] over the cache kv [slots, C + P], row by row in float64 ->
    [B * W, H, C].

    page_table int [B, pages], kv_lens int [B]. A row's last query sees its keys from ``first_key``
    on, each one before it one less; with ``tree`` int64 [B, W], of the row's W own tokens, which
    end its keys, a query sees those whose bit is set. A query that sees no key gives zeros.
    """
    rows = kv_lens.shape[0]
    (tokens, heads, _) = query.shape
    width = tokens // rows
    out = torch.zeros(tokens, heads, lora, dtype=torch.float64, device=query.device)
    for row in range(rows):
        length = int(kv_lens[row])
        at = torch.arange(first_key, max(length, first_key), device=query.device)
        keys = kv[page_table[row].long()[at // page_size] * page_size + at % page_size].double()
        own = at - (length - width)
        for token in range(width if len(at) else 0):
            seen = own <= token
            if tree is not None:
                seen = (own < 0) | (tree[row, token] >> own.clamp(min=0) & 1).bool()
            if seen.any():
                index = row * width + token
                weights = torch.softmax(query[index].double() @ keys[seen].T * scale, dim=-1)
                out[index] = weights @ keys[seen, :lora]
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
    """Rows of q [n, H, D] over their own rows of k [m, H, D], v [m, H, V] -> out [n, H, V], lse [n,
    H], in float64.

    With ``causal`` a row's last query sees all its keys, each one before it one less. A query that
    sees none has zeros and -inf.
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
