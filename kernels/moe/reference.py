"""Routed experts in plain torch: reference, CPU and grouped-GEMM versions.

All functions take w13 [E, H, 2I] (gate then up) and w2 [E, I, H], both stored input-major, ids
int64 [T, K] that index their first dimension, and weights float32 [T, K]. ``activate`` maps [P, 2I]
to [P, I].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
#: most padded rows for each real row at which one batched GEMM beats a loop over experts
MAX_PADDING = 4
MAX_PAIRWISE = 16  #: most (token, expert) pairs for which matrix-vector products are used


def experts_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    activate: Activation,
) -> Tensor:
    """Apply every expert to the tokens that chose it: x [T, H] -> [T, H].

    An id of -1 stands for an expert of another rank.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        token, column = (ids == expert).nonzero(as_tuple=True)
        y = activate(x[token] @ w13[expert]) @ w2[expert]
        out.index_add_(0, token, y.float() * weights[token, column, None])
    return out.to(x.dtype)


def experts_host(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, activate: Activation
) -> Tensor:
    """Compute :func:`experts_reference` on the CPU, where reading ids is free. Ids must be >= 0.

    Few pairs are computed by matrix-vector products. If the experts have about equal numbers
    of pairs, one padded batched GEMM over all experts is used, which keeps every core busy.
    Otherwise (many experts, few of them chosen) there is a loop over the chosen experts.
    """
    tokens = ids.shape[0]
    pairs = ids.numel()
    experts = w13.shape[0]
    if not tokens:
        return torch.zeros_like(x)
    if tokens == 1 or (pairs <= MAX_PAIRWISE and pairs * 2 <= experts):
        return _pairwise(x, w13, w2, ids, weights, activate)
    flat = ids.numpy().ravel()
    counts = np.bincount(flat, minlength=experts)
    max_rows = int(counts.max())
    if experts * max_rows <= MAX_PADDING * pairs:
        y = _padded(x, w13, w2, flat, counts, max_rows, activate)
    else:
        y = _looped(x, w13, w2, flat, counts, activate)
    return torch.bmm(weights.to(y.dtype).unsqueeze(1), y.view(tokens, -1, y.shape[-1])).squeeze(1)


def _pairwise(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, activate: Activation
) -> Tensor:
    """Compute the experts by matrix-vector products, one (token, expert) pair at a time: [T, H]."""
    chosen = ids.tolist()
    rows = x.unsqueeze(1).unbind()
    hidden = torch.cat(
        [torch.mm(row, w13[e]) for row, experts in zip(rows, chosen) for e in experts]
    )
    inner = (activate(hidden) * weights.to(x.dtype).view(-1, 1)).unsqueeze(1).unbind()
    out = []
    pair = iter(inner)
    for experts in chosen:
        total = torch.mm(next(pair), w2[experts[0]])
        for expert in experts[1:]:
            total.addmm_(next(pair), w2[expert])
        out.append(total)
    return torch.cat(out) if len(out) > 1 else out[0]


def experts_some_host(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    activate: Activation,
) -> Tensor:
    """Compute :func:`experts_reference` on the CPU. Pairs with an id of -1 are skipped."""
    chosen = ids.numpy().ravel()
    here = np.flatnonzero(chosen >= 0)
    if len(here) == len(chosen):
        return experts_host(x, w13, w2, ids, weights, activate)
    out = torch.zeros(x.shape, dtype=torch.float32)
    if not len(here):
        return out.to(x.dtype)
    pairs = here[np.argsort(chosen[here], kind="stable")]
    hit, sizes = np.unique(chosen[pairs], return_counts=True)
    experts = hit.tolist()
    each = sizes.tolist()
    token = torch.from_numpy(pairs // ids.shape[1])
    rows = torch.split(x.index_select(0, token), each)
    inner = torch.split(
        activate(torch.cat([torch.mm(part, w13[e]) for part, e in zip(rows, experts)])), each
    )
    y = torch.cat([torch.mm(part, w2[e]) for part, e in zip(inner, experts)])
    y = y * weights.flatten().index_select(0, torch.from_numpy(pairs)).unsqueeze(1)
    return out.index_add_(0, token, y).to(x.dtype)


def _sorted_places(
    flat: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pairs in order of experts, and each one's place among its expert's pairs."""
    order = np.argsort(flat, kind="stable")
    firsts = np.cumsum(counts) - counts
    return order, np.arange(len(flat)) - firsts[flat[order]]


def _padded(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    flat: NDArray[np.int64],
    counts: NDArray[np.int64],
    max_rows: int,
    activate: Activation,
) -> Tensor:
    """Compute the experts by batched GEMMs over [E, max_rows, .]; padding rows repeat token 0.

    Returns:
        [T * K, H], one row per pair, without routing weights.
    """
    experts = len(counts)
    width = len(flat) // x.shape[0]
    order, place = _sorted_places(flat, counts)
    cell = flat[order] * max_rows + place
    source = np.zeros(experts * max_rows, np.int64)
    source[cell] = order // width
    cell_of = np.empty(len(flat), np.int64)
    cell_of[order] = cell
    rows = x.index_select(0, torch.from_numpy(source)).view(experts, max_rows, -1)
    hidden = torch.bmm(rows, w13).view(experts * max_rows, -1)
    y = torch.bmm(activate(hidden).view(experts, max_rows, -1), w2).view(experts * max_rows, -1)
    return y.index_select(0, torch.from_numpy(cell_of))


def _looped(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    flat: NDArray[np.int64],
    counts: NDArray[np.int64],
    activate: Activation,
) -> Tensor:
    """Compute the experts by one GEMM for each expert that a token chose.

    Returns:
        [T * K, H], one row per pair, without routing weights.
    """
    width = len(flat) // x.shape[0]
    order, _ = _sorted_places(flat, counts)
    hit = np.flatnonzero(counts)
    sizes = counts[hit].tolist()
    rows = x.index_select(0, torch.from_numpy(order // width)).split(sizes)
    hidden = torch.cat([torch.mm(part, w13[e]) for part, e in zip(rows, hit.tolist())])
    inner = activate(hidden).split(sizes)
    y = torch.cat([torch.mm(part, w2[e]) for part, e in zip(inner, hit.tolist())])
    back = np.empty(len(flat), np.int64)
    back[order] = np.arange(len(flat))
    return y.index_select(0, torch.from_numpy(back))


def experts_device(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, activate: Activation
) -> Tensor:
    """Compute :func:`experts_reference` by grouped GEMMs over sorted pairs, without device syncs.

    Rows of every operand must be a multiple of 16 bytes (grouped_mm).
    """
    tokens, width = ids.shape
    flat, order = ids.flatten().sort(stable=True)
    token = order // width
    ends = torch.searchsorted(flat, torch.arange(w13.shape[0], device=x.device), right=True)
    ends = ends.to(torch.int32)
    absent = (flat < 0).unsqueeze(1)
    # NOTE: ids of -1 sort first, so the rows of experts of other ranks are part of the first group.
    # Their results are zeroed below.
    hidden = F.grouped_mm(x.index_select(0, token), w13, offs=ends)
    y = F.grouped_mm(activate(hidden), w2, offs=ends).float()
    y = (y * weights.flatten()[order].unsqueeze(1)).masked_fill_(absent, 0.0)
    return torch.zeros(tokens, x.shape[1], device=x.device).index_add_(0, token, y).to(x.dtype)
