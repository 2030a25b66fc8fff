"""The MoE gate in one or two launches: scores in float32, the choice of experts, their weights.

The score GEMM is split over experts and, for few tokens, over the depth. If choosing is cheap, the
last program of a block of tokens sums the splits and chooses. It finds that it is the last by a
counter of finished programs, which it resets. Otherwise a second launch chooses, one warp per
token. From ``library_tokens_min`` tokens on there are always two launches, and
the first is cuBLAS's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.moe.route_choice import choice_constants, choose, choose_each

VECTOR_TOKENS_MAX = 4  #: most tokens for matrix-vector scores
VECTOR_HIDDEN_MAX = 8192  #: most channels for matrix-vector scores
ONE_LAUNCH_EXPERTS_MAX = 128  #: most experts, without groups, to choose in the first launch
#: fewest tokens for 16-bit scores by cuBLAS, with more than ONE_LAUNCH_EXPERTS_MAX experts
LIBRARY_TOKENS_MANY_EXPERTS = 256
#: fewest tokens for 16-bit scores by cuBLAS, with at most ONE_LAUNCH_EXPERTS_MAX experts. NOTE:
#: measured only with 64 experts, 8192 and 16384 tokens
LIBRARY_TOKENS_FEW_EXPERTS = 2048
LARGE_BLOCK_TOKENS_MIN = 1024  #: fewest tokens for large blocks
BUSY_PROGRAMS = 512  #: programs that keep a device busy
TICKETS_MAX = 16384  #: most blocks of tokens, each with a ticket counter


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
    """Return one token's scores, float32 [1, BE]. Gate weights are loaded before x is ready."""
    expert, k = first_expert + tl.arange(0, BE), tl.arange(0, BK)
    gate = tl.load(
        weight + tl.where(expert < experts, expert, 0)[:, None] * hidden + k[None, :],
        mask=k[None, :] < hidden,
        other=0.0,
    )
    dependent_launch.wait(DEPENDENT)
    value = tl.load(x + token.to(tl.int64) * x_stride + k, mask=k < hidden, other=0.0)
    return tl.sum(gate.to(tl.float32) * value.to(tl.float32)[None, :], 1)[None, :]


@triton.jit
def _matrix_scores(
    x,
    weight,
    ready,
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
    SETS_READY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Return scores over channels ``start`` to ``end``, float32 [BT, BE].

    With ``SETS_READY`` one program sets the ready flag ``ready`` once x is available.
    """
    token, expert, k = first + tl.arange(0, BT), first_expert + tl.arange(0, BE), tl.arange(0, BK)
    x_at = x + tl.where(token < tokens, token, 0).to(tl.int64)[:, None] * x_stride + k[None, :]
    rows = weight + tl.where(expert < experts, expert, 0)[:, None] * hidden
    if DEPENDENT:
        dependent_launch.fetch(
            rows + tl.minimum(start + tl.arange(0, LINES) * 64, end - 1)[None, :]
        )
    dependent_launch.wait(DEPENDENT)
    if SETS_READY:
        if first + first_expert + start == 0:
            tl.atomic_xchg(ready, 1, sem="release")
    total = tl.zeros((BT, BE), tl.float32)
    for at in range(start, end, BK):
        inside = k[None, :] < end - at
        value = tl.load(x_at + at, mask=inside, other=0.0)
        gate = tl.load(rows + at + k[None, :], mask=inside, other=0.0)
        if CAST:
            value, gate = value.to(tl.float32), gate.to(tl.float32)
        total = tl.dot(value, tl.trans(gate), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def _route(
    x,
    weight,
    bias,
    logits,
    tickets,
    ready,
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
    FUSED_SHARED: tl.constexpr,
    OUT2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SETS_READY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Score a block of tokens for a block of experts over one depth split.

    With CHOOSE the last program of a block of tokens also chooses its experts. The scores
    of one token are computed by :func:`_vector_scores`, those of several by
    :func:`_matrix_scores`.
    """
    dependent_launch.begin(DEPENDENT)
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
            ready,
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
            SETS_READY,
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
                choose(
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
                    FUSED_SHARED,
                    OUT2,
                    SIGMOID,
                    RENORMALIZE,
                )


@cache
def _tickets(device: torch.device) -> Tensor:
    """Return a device's counters of finished programs, one per block of tokens.

    NOTE: all streams share the counters, so two gates must not run at once. Allocate before any
    capture.
    """
    return torch.zeros(TICKETS_MAX, dtype=torch.int32, device=device)


def _is_small(tokens: int, experts: int) -> bool:
    """Return whether one small block of tokens chooses among few experts, in one launch.

    On an H200 8 tokens of 2048 channels with 64 experts take 4.95 us, norm included, with blocks of
    16 experts, 8 splits and 8 warps, and 5.57 with 32 experts, 4 splits and 4 warps.
    """
    return VECTOR_TOKENS_MAX < tokens <= 16 and experts <= ONE_LAUNCH_EXPERTS_MAX


def _blocks(tokens: int, experts: int, hidden: int) -> tuple[int, int, int, int]:
    """Return the numbers of tokens, experts and channels of a block, and of depth splits."""
    deep = next_power_of_2(hidden)
    if tokens <= VECTOR_TOKENS_MAX and deep <= VECTOR_HIDDEN_MAX:
        return 1, 1, deep, 1
    large = tokens >= LARGE_BLOCK_TOKENS_MIN
    small = _is_small(tokens, experts)
    deepest = 64 if large else 256 if experts <= ONE_LAUNCH_EXPERTS_MAX else 128
    depth = min(deepest, max(16, deep))
    rows = 64 if large else 16
    columns = min(128 if large else 16 if small else 32, max(16, next_power_of_2(experts)))
    programs = cdiv(tokens, rows) * cdiv(experts, columns)
    splits = max(1, min(8, BUSY_PROGRAMS // programs, hidden // (depth if small else 2 * depth)))
    return rows, columns, depth, splits


def library_tokens_min(experts: int) -> int:
    """Return the number of tokens from which on cuBLAS computes the scores of ``experts`` experts.

    cuBLAS sets no ready flag.
    """
    many = experts > ONE_LAUNCH_EXPERTS_MAX
    return LIBRARY_TOKENS_MANY_EXPERTS if many else LIBRARY_TOKENS_FEW_EXPERTS


def _library_pays(x: Tensor, weight: Tensor) -> bool:
    """Return whether cuBLAS is faster for scores of x [T, H] by weight [E, H]."""
    many = x.shape[0] >= library_tokens_min(weight.shape[0])
    return many and x.dtype == weight.dtype != torch.float32


def _library_scores(x: Tensor, weight: Tensor) -> Tensor:
    """Return scores float32 [T, E] of x [T, H] by weight [E, H], summed in float32."""
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
    fused_shared: int,
    ready: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts. Of equal scores the lower expert is first.

    NaN scores give valid ids and NaN weights.

    Args:
        x: [T, H]; rows may be strided.
        weight: [E, H].
        bias: float32 [E], for a sigmoid gate that chooses by score + bias; None: softmax.
        k: Experts chosen for a token.
        groups: Equal groups of experts.
        topk_groups: Groups from which experts are chosen.
        renormalize: Divide the weights of a token by their sum.
        scale: Factor on the weights.
        fused_shared: Number A of fused shared experts. Every token gets them in the last columns,
            with ids from E on and weight 1.
        ready: int32 ready flag: with more than ``VECTOR_TOKENS_MAX`` tokens ``ready[0]`` is set
            to 1 once x is available.

    Returns:
        Weights float32 [T, K + A] and ids int32 [T, K + A].
    """
    tokens = x.shape[0]
    (experts, hidden) = weight.shape
    ids = torch.empty(tokens, k + fused_shared, dtype=torch.int32, device=x.device)
    weights = torch.empty(ids.shape, device=x.device)
    if not tokens:
        return weights, ids
    constants = choice_constants(
        experts, k, groups, topk_groups, fused_shared, bias is not None, renormalize
    )
    if ready is None and _library_pays(x, weight):
        constants |= {"SPLITS": 1, "DEPENDENT": False}
        choose_each(_library_scores(x, weight), bias, weights, ids, scale, constants)
        return weights, ids
    logits, has_chosen = _launch(x, weight, bias, weights, ids, scale, ready, constants)
    if not has_chosen:
        constants |= {"SPLITS": len(logits), **dependent_launch.options()}
        choose_each(logits, bias, weights, ids, scale, constants)
    return weights, ids


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    scale: float,
    ready: Tensor | None,
    constants: Mapping[str, int],
) -> tuple[Tensor, bool]:
    """Launch the score kernel; where choosing is cheap it also fills ``weights`` and ``ids``.

    Arguments as in :func:`route`; ``constants`` are those of :func:`choice_constants`.

    Returns:
        Scores float32 [splits, T, E], to be summed over the splits; and whether the kernel
        has chosen the experts.
    """
    tokens = x.shape[0]
    experts, hidden = weight.shape
    sizes, split_depth, grid = _score_constants(tokens, experts, hidden, constants["GROUPS"] > 1)
    assert grid[1] <= TICKETS_MAX, "more tokens than a step may have"
    logits = torch.empty(sizes["SPLITS"], tokens, experts, device=x.device)
    tickets = _tickets(x.device)
    _route[grid](
        x,
        weight,
        bias,
        logits,
        tickets,
        tickets if ready is None else ready,
        weights,
        ids,
        tokens,
        experts,
        hidden,
        x.stride(0),
        scale,
        split_depth,
        CAST=x.dtype != weight.dtype,
        SETS_READY=ready is not None,
        **sizes,
        **constants,
        **dependent_launch.options(),
    )
    return logits, bool(sizes["CHOOSE"])


def _score_constants(
    tokens: int, experts: int, hidden: int, has_groups: bool
) -> tuple[dict[str, int], int, tuple[int, int]]:
    """Return the constants and warps of the score kernel, which follow from shapes.

    ``CHOOSE``: the score kernel also chooses, because that is cheap.

    Returns:
        The constants, the channels of a split and the launch grid.
    """
    block_tokens, block_experts, block_channels, splits = _blocks(tokens, experts, hidden)
    split_depth = cdiv(cdiv(hidden, block_channels), splits) * block_channels
    is_cheap = not has_groups and experts <= ONE_LAUNCH_EXPERTS_MAX
    constants = {
        "E_BLOCKS": cdiv(experts, block_experts),
        "SPLITS": splits,
        "BT": block_tokens,
        "BE": block_experts,
        "BK": block_channels,
        "LINES": next_power_of_2(cdiv(split_depth, 64)),
        "ROWS": min(block_tokens, 16),
        "CHOOSE": block_tokens == 1 or is_cheap,
        "num_warps": 8 if _is_small(tokens, experts) else 4,
    }
    grid = constants["E_BLOCKS"] * splits, cdiv(tokens, block_tokens)
    return constants, split_depth, grid
