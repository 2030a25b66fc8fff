"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) on plain tensors. Pure functions, reference beside them.

R rows, W queries a row, L keys a row, H heads, C latent size, P rope size, N nope size, V value size. A head's key is
``[W_UK latent, rope]`` and its value ``W_UV latent``; absorbed, W_UK moves to the query and W_UV to the output, so that
the cache is read as it lies: one key head of size C + P whose first C numbers are also the value.
"""
from __future__ import annotations

import torch
from torch import Tensor


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """q_nope [T, H, N], w_uk [H, N, C] -> [T, H, C]."""
    return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


def project_output(out_latent: Tensor, w_uv: Tensor) -> Tensor:
    """out_latent [T, H, C], w_uv [H, C, V] -> [T, H * V]."""
    out = torch.bmm(out_latent.transpose(0, 1), w_uv).transpose(0, 1)
    return out.reshape(out_latent.shape[0], -1)


def attend_latent(q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, scale: float, bias: Tensor) -> Tensor:
    """q_latent [R, W, H, C], q_rope [R, W, H, P], latent [R, L, C], rope [R, L, P] -> [R, W, H, C].

    ``bias`` float32 [R, W, L]: 0 where a query sees a key, -inf elsewhere. Scores and softmax are float32.
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


def mla_reference(q_nope: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, w_uk: Tensor, w_uv: Tensor,
                  scale: float) -> Tensor:
    """One row by the definition, un-absorbed, in float64.

    q_nope [T, H, N], q_rope [T, H, P], latent [M, C], rope [M, P], w_uk [H, N, C], w_uv [H, C, V] -> [T, H, V]; the
    last query sees all M keys, each one before it one less.
    """
    count, keys = q_nope.shape[0], latent.shape[0]
    k_nope = torch.einsum("mc,hnc->mhn", latent.double(), w_uk.double())
    value = torch.einsum("mc,hcv->mhv", latent.double(), w_uv.double())
    scores = torch.einsum("thn,mhn->htm", q_nope.double(), k_nope)
    scores = (scores + torch.einsum("thp,mp->htm", q_rope.double(), rope.double())) * scale
    last_seen = torch.arange(count, device=latent.device) + (keys - count)
    hidden = torch.arange(keys, device=latent.device) > last_seen.unsqueeze(1)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("htm,mhv->thv", weights, value)
