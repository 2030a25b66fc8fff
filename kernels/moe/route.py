"""A mixture's gate in one launch or two: scores in float32, the choice of experts, their weights.

The score product is shared out among programs, over experts and, for few tokens, over its depth
too. Where choosing is little work, the program that ends last for a block of tokens adds up the
parts and chooses; it is found by a ticket that it sets back to zero. Otherwise a second launch
chooses, a warp a token. From ``many`` tokens on that is so for any gate, and the scores before it
are a library's product.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

VECTOR = 4  #: tokens up to which scores are matrix-vector products
DEEPEST = 8192  #: channels up to which they may be
#: experts up to which the last program chooses for a block of tokens, if they form no groups
AT_ONCE = 128
#: tokens from which a library's product of 16-bit numbers is faster, where more than AT_ONCE
#: experts score
MANY = 256
#: the same where as many or fewer do. NOTE: measured with 64 experts, and 8192 and 16384 tokens,
#: alone
MORE = 2048
WIDE = 1024  #: tokens from which blocks are large
PROGRAMS = 512  #: about as many as keep a device busy
TICKETS = 16384
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # an expert of a group that is left out
INVALID: tl.constexpr = tl.constexpr(
    -1.0e30
)  # a score that is no number: chosen last, but a valid expert


@triton.jit
def _vector_scores(
    x,
    weight,
    token,
    first_expert,
    experts,
    hidden,
    x_stride,
    BE: tl.constexpr,
    BK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """float32 [1, BE]: one token's x times gate weights, which are on their way before x is there."""
    expert, k = first_expert + tl.arange(0, BE), tl.arange(0, BK)
    gate = tl.load(
        weight + tl.where(expert < experts, expert, 0)[:, None] * hidden + k[None, :],
        mask=k[None, :] < hidden,
        other=0.0,
    )
    dependent.wait(DEPENDENT)
    value = tl.load(x + token.to(tl.int64) * x_stride + k, mask=k < hidden, other=0.0)
    return tl.sum(gate.to(tl.float32) * value.to(tl.float32)[None, :], 1)[None, :]


@triton.jit
def _matrix_scores(
    x,
    weight,
    begun,
    first,
    first_expert,
    start,
    end,
    tokens,
    experts,
    hidden,
    x_stride,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    LINES: tl.constexpr,
    CAST: tl.constexpr,
    TELLS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """float32 [BT, BE]: x times gate weights over channels ``start`` to ``end``. With ``TELLS`` one
    program sets ``begun`` to 1 as soon as x is there."""
    token, expert, k = first + tl.arange(0, BT), first_expert + tl.arange(0, BE), tl.arange(0, BK)
    x_at = x + tl.where(token < tokens, token, 0).to(tl.int64)[:, None] * x_stride + k[None, :]
    rows = weight + tl.where(expert < experts, expert, 0)[:, None] * hidden
    if DEPENDENT:
        dependent.fetch(rows + tl.minimum(start + tl.arange(0, LINES) * 64, end - 1)[None, :])
    dependent.wait(DEPENDENT)
    if TELLS:
        if first + first_expert + start == 0:
            tl.atomic_xchg(begun, 1, sem="release")
    total = tl.zeros((BT, BE), tl.float32)
    for at in range(start, end, BK):
        inside = k[None, :] < end - at
        value = tl.load(x_at + at, mask=inside, other=0.0)
        gate = tl.load(rows + at + k[None, :], mask=inside, other=0.0)
        if CAST:
            value, gate = value.to(tl.float32), gate.to(tl.float32)
        total = tl.dot(value, tl.trans(gate), total, input_precision="ieee")
    return total


@triton.jit
def _best_groups(
    choice, group, within, G2: tl.constexpr, TOPK_GROUPS: tl.constexpr, SIGMOID: tl.constexpr
):
    """bool [R, G2, 1]: the groups kept, by their best expert, with ``SIGMOID`` by their best two
    together.
    """
    if SIGMOID:
        best, at = tl.max(choice, 2, return_indices=True)
        best += tl.max(tl.where(within[None, None, :] == at[:, :, None], float("-inf"), choice), 2)
    else:
        best = tl.max(choice, 2)
    kept = group[None, :] < tl.zeros_like(best).to(tl.int32)
    for _ in tl.static_range(TOPK_GROUPS):
        hit = group[None, :] == tl.argmax(best, 1)[:, None]
        kept = kept | hit
        best = tl.where(hit, float("-inf"), best)
    return kept[:, :, None]


@triton.jit
def _choose(
    logits,
    bias,
    weights,
    ids,
    first,
    tokens,
    experts,
    scale,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    G2: tl.constexpr,
    PER2: tl.constexpr,
    TOPK: tl.constexpr,
    APPENDED: tl.constexpr,
    OUT2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Experts and weights of the ROWS tokens from ``first`` on. Experts lie as [group, within the
    group].
    """
    per = experts // GROUPS
    row, group, within = first + tl.arange(0, ROWS), tl.arange(0, G2), tl.arange(0, PER2)
    real = ((group[:, None] < GROUPS) & (within[None, :] < per))[None, :, :]
    expert = (group[:, None] * per + within[None, :])[None, :, :]
    at = row.to(tl.int64)[:, None, None] * experts + expert
    score = tl.zeros((ROWS, G2, PER2), tl.float32)
    for split in tl.static_range(SPLITS):
        score += tl.load(
            logits + tokens.to(tl.int64) * split * experts + at,
            mask=real & (row < tokens)[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
        choice = score + tl.load(bias + expert, mask=real, other=0.0)
    else:
        score = tl.where(real, score, float("-inf"))
        score = tl.exp(score - tl.max(tl.max(score, 2), 1)[:, None, None])
        score = score / tl.sum(tl.sum(score, 2), 1)[:, None, None]
        choice = score
    choice = tl.where(choice == choice, choice, INVALID)
    choice = tl.where(real, choice, float("-inf"))
    if TOPK_GROUPS < GROUPS:
        kept = _best_groups(choice, group, within, G2, TOPK_GROUPS, SIGMOID)
        choice = tl.where(real & (kept == 0), LOWEST if SIGMOID else 0.0, choice)
    choice = tl.reshape(choice, (ROWS, G2 * PER2))
    score = tl.reshape(score, (ROWS, G2 * PER2))

    place, column = tl.arange(0, G2 * PER2), tl.arange(0, OUT2)
    found = tl.zeros((ROWS, OUT2), tl.float32)
    chosen = tl.zeros((ROWS, OUT2), tl.int32) + (experts - TOPK + column)[None, :]
    for j in tl.static_range(TOPK):
        best = tl.argmax(choice, 1)
        hit = place[None, :] == best[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), 1)
        choice = tl.where(hit, float("-inf"), choice)
        found = tl.where(column[None, :] == j, value[:, None], found)
        chosen = tl.where(column[None, :] == j, (best // PER2 * per + best % PER2)[:, None], chosen)
    if RENORMALIZE:
        found = found / (tl.sum(found, 1)[:, None] + 1e-20)
    found = tl.where(column[None, :] < TOPK, found * scale, 1.0)
    out = row.to(tl.int64)[:, None] * (TOPK + APPENDED) + column[None, :]
    inside = (row < tokens)[:, None] & (column < TOPK + APPENDED)[None, :]
    tl.store(weights + out, found, mask=inside)
    tl.store(ids + out, chosen, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _route(
    x,
    weight,
    bias,
    logits,
    tickets,
    begun,
    weights,
    ids,
    tokens,
    experts,
    hidden,
    x_stride,
    scale,
    split_depth,
    E_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    LINES: tl.constexpr,
    CAST: tl.constexpr,
    CHOOSE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    G2: tl.constexpr,
    PER2: tl.constexpr,
    TOPK: tl.constexpr,
    APPENDED: tl.constexpr,
    OUT2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TELLS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dependent.begin(DEPENDENT)
    part, block = tl.program_id(0), tl.program_id(1)
    first, first_expert, split = block * BT, part % E_BLOCKS * BE, part // E_BLOCKS
    start = split * split_depth
    if BT == 1:
        total = _vector_scores(
            x, weight, first, first_expert, experts, hidden, x_stride, BE, BK, DEPENDENT
        )
    else:
        total = _matrix_scores(
            x,
            weight,
            begun,
            first,
            first_expert,
            start,
            tl.minimum(start + split_depth, hidden),
            tokens,
            experts,
            hidden,
            x_stride,
            BT,
            BE,
            BK,
            LINES,
            CAST,
            TELLS,
            DEPENDENT,
        )
    token, expert = first + tl.arange(0, BT), first_expert + tl.arange(0, BE)
    at = (tokens.to(tl.int64) * split + token)[:, None] * experts + expert[None, :]
    tl.store(logits + at, total, mask=(token < tokens)[:, None] & (expert < experts)[None, :])
    if CHOOSE:
        tl.debug_barrier()
        ticket = 0
        if E_BLOCKS * SPLITS > 1:
            ticket = tl.atomic_add(tickets + block, 1, sem="acq_rel")
        if ticket == E_BLOCKS * SPLITS - 1:
            if E_BLOCKS * SPLITS > 1:
                tl.store(tickets + block, 0)
            for past in range(0, BT, ROWS):
                _choose(
                    logits,
                    bias,
                    weights,
                    ids,
                    first + past,
                    tokens,
                    experts,
                    scale,
                    ROWS,
                    SPLITS,
                    GROUPS,
                    TOPK_GROUPS,
                    G2,
                    PER2,
                    TOPK,
                    APPENDED,
                    OUT2,
                    SIGMOID,
                    RENORMALIZE,
                )


@triton.jit(do_not_specialize=["tokens"])
def _choose_each(
    logits,
    bias,
    weights,
    ids,
    tokens,
    experts,
    scale,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    G2: tl.constexpr,
    PER2: tl.constexpr,
    TOPK: tl.constexpr,
    APPENDED: tl.constexpr,
    OUT2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a token."""
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    _choose(
        logits,
        bias,
        weights,
        ids,
        tl.program_id(0),
        tokens,
        experts,
        scale,
        1,
        SPLITS,
        GROUPS,
        TOPK_GROUPS,
        G2,
        PER2,
        TOPK,
        APPENDED,
        OUT2,
        SIGMOID,
        RENORMALIZE,
    )


@cache
def _tickets(device: torch.device) -> Tensor:
    """NOTE: one for all streams of a device, so two gates must not run at once on it; made before
    any capture.
    """
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


def _blocks(tokens: int, experts: int, hidden: int) -> tuple[int, int, int, int]:
    """(tokens, experts and channels of a block, splits of the depth)."""
    wide = next_power_of_2(experts)
    deep = next_power_of_2(hidden)
    if tokens <= VECTOR and deep <= DEEPEST:
        return 1, 1, deep, 1
    depth = min(128, max(16, deep))
    rows, columns = (
        (64, min(128, max(16, wide))) if tokens >= WIDE else (16, min(32, max(16, wide)))
    )
    if tokens >= WIDE:
        depth = min(64, depth)
    elif experts <= AT_ONCE:
        depth = min(256, max(16, deep))
    programs = cdiv(tokens, rows) * cdiv(experts, columns)
    return rows, columns, depth, max(1, min(8, PROGRAMS // programs, hidden // (2 * depth)))


def many(experts: int) -> int:
    """Tokens from which a library scores so many experts, unless the gate has to say when x is
    there.
    """
    return MANY if experts > AT_ONCE else MORE


def _library_pays(x: Tensor, weight: Tensor) -> bool:
    return x.shape[0] >= many(weight.shape[0]) and x.dtype == weight.dtype != torch.float32


def _library_scores(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [T, E], added up in float32."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
    appended: int,
    begun: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [T, H] rows strided at will, weight [E, H] -> weights float32 [T, K + A], ids int32 [T, K +
    A].

    ``bias`` float32 [E]: a sigmoid gate that chooses by score + bias; None: softmax. Of ``groups``
    equal groups only the best ``topk_groups`` count. The A = ``appended`` last columns are experts
    E to E + A - 1 with weight 1. Equal
    scores: the lower number first. A score that is no number gives valid ids with weights that are
    none either. With more than ``VECTOR`` tokens ``begun[0]`` (int32) becomes 1 as soon as x is
    there.
    """
    tokens = x.shape[0]
    (experts, hidden) = weight.shape
    ids = torch.empty(tokens, k + appended, dtype=torch.int32, device=x.device)
    weights = torch.empty(ids.shape, device=x.device)
    if not tokens:
        return weights, ids
    grouped = topk_groups < groups
    g2, per2 = (
        (next_power_of_2(groups), next_power_of_2(experts // groups))
        if grouped
        else (1, next_power_of_2(experts))
    )
    rule = {
        "GROUPS": groups if grouped else 1,
        "TOPK_GROUPS": topk_groups if grouped else 1,
        "G2": g2,
        "PER2": per2,
        "TOPK": k,
        "APPENDED": appended,
        "OUT2": next_power_of_2(k + appended),
        "SIGMOID": bias is not None,
        "RENORMALIZE": renormalize,
    }
    if begun is None and _library_pays(x, weight):
        _choose_each[(tokens,)](
            _library_scores(x, weight),
            bias,
            weights,
            ids,
            tokens,
            experts,
            scale,
            num_warps=1,
            SPLITS=1,
            DEPENDENT=False,
            **rule,
        )
        return weights, ids
    bt, be, bk, splits = _blocks(tokens, experts, hidden)
    split_depth = cdiv(cdiv(hidden, bk), splits) * bk
    logits = torch.empty(splits, tokens, experts, device=x.device)
    e_blocks = cdiv(experts, be)
    blocks = cdiv(tokens, bt)
    assert blocks <= TICKETS, "more tokens than a step may hold"
    at_once = bt == 1 or (not grouped and experts <= AT_ONCE)
    choice = {**rule, "SPLITS": splits, **dependent.options()}
    _route[(e_blocks * splits, blocks)](
        x,
        weight,
        bias,
        logits,
        (tickets := _tickets(x.device)),
        tickets if begun is None else begun,
        weights,
        ids,
        tokens,
        experts,
        hidden,
        x.stride(0),
        scale,
        split_depth,
        E_BLOCKS=e_blocks,
        BT=bt,
        BE=be,
        BK=bk,
        LINES=next_power_of_2(cdiv(split_depth, 64)),
        CAST=x.dtype != weight.dtype,
        CHOOSE=at_once,
        ROWS=min(bt, 16),
        TELLS=begun is not None,
        **choice,
    )
    if not at_once:
        _choose_each[(tokens,)](
            logits, bias, weights, ids, tokens, experts, scale, num_warps=1, **choice
        )
    return weights, ids
