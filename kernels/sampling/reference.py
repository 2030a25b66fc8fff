"""Sampling on tensors: uniforms, inverse-CDF draws, top-k/top-p, penalties, log-probabilities.

All functions are pure and need no host synchronisation on an accelerator. Shapes: N rows of logits,
V vocabulary size. The uniforms are counter-based. Every result of a row depends on that row alone.
For this, a draw walks the vocabulary in order of ids, never in sorted order, and a cut-off is a
*value*. So a row draws the same token whether or not another row of the batch needs a sort.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from glowplug.kernels.launch.chunks import LOGPROB_ROWS

DRAW_BLOCK = 256  #: vocabulary entries that ``draw`` sums at a time
MASK_ROWS = 32  #: masks applied at a time, to bound the temporary memory of ``forbid``
SORT_ROWS = 64  #: rows sorted at a time, to bound the temporary memory of ``cutoff``


def _signed(value: int) -> int:
    """Return the int64 with the same bits as the unsigned ``value``."""
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically (torch's shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 (Steele, Lea, Flood 2014) to int64 [...], modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Return float64 [N] in [0, 1) that depend only on (seed, position, stream).

    Args:
        seeds: int64 [N]
        positions: int64 [N]
        stream: a small integer; stream 0 draws tokens, speculation uses others for acceptance tests
            and draft tokens
    """
    offset = _signed(((stream + 1) * (GOLDEN % (1 << 64))) % (1 << 64))
    state = mix64(mix64(seeds + offset) + positions * GOLDEN)
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index int64 [N] of the first entry of ``cumulative`` above ``target``.

    ``cumulative`` is float64 [N, K], ``target`` [N, 1]. The target is kept below the total, so the
    entry found has a positive share. NaN gives 0.
    """
    total = cumulative[:, -1:]
    below = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative <= below).sum(-1).clamp_(max=cumulative.shape[1] - 1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draw one index per row of ``weights`` by inverse CDF at u [N], and return them, int64 [N].

    ``weights`` float32 [N, V] >= 0 need not be normalised. There are two levels in float64 (block
    sums, then one block), so no [N, V] float64 temporary. A zero weight is never drawn.
    """
    rows, vocab = weights.shape
    if vocab % DRAW_BLOCK:
        weights = F.pad(weights, (0, -vocab % DRAW_BLOCK))
    blocks = weights.view(rows, -1, DRAW_BLOCK)
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum_(-1)
    target = u[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)[:, None]
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = (
        blocks.gather(1, block[:, :, None].expand(-1, 1, DRAW_BLOCK))
        .squeeze(1)
        .cumsum(-1, dtype=torch.float64)
    )
    index = block.squeeze(1) * DRAW_BLOCK + _first_above(inside, target - before)
    return index.clamp_(max=vocab - 1)


# ---- the most likely token of a vocabulary that is divided among ranks ---------------------------

LARGEST = 0x7FFFFFFF  #: largest int32
INFINITY_BITS = 0x7F800000  #: bits of an infinite float32


def best_keys(logits: Tensor, first: int) -> Tensor:
    """Return a key of each row's most likely token, int64 [N]; see ``best_of_keys``.

    Keys order by logit, then by smaller token id. NaN is the largest logit, as in ``argmax``.

    Args:
        logits: float32 [N, S], those of the tokens ``first`` to ``first + S - 1``
        first: token id of the first column
    """
    tokens = logits.argmax(-1)
    peaks = logits.gather(1, tokens[:, None]).squeeze(1) + 0.0  # -0 becomes 0
    bits = peaks.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ LARGEST, bits).masked_fill_(peaks.isnan(), LARGEST)
    return (ordered.long() << 32) + (LARGEST - first - tokens)


def best_of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens of rows whose vocabulary is divided among ranks.

    Args:
        keys: int64 [ranks, N], from ``best_keys``

    Returns:
        tokens int64 [N], and bool [N]: the logit of the token is not finite
    """
    best = keys.amax(0)
    ordered = best >> 32
    bad = (ordered >= INFINITY_BITS) | (ordered < -INFINITY_BITS)
    return LARGEST - (best & 0xFFFFFFFF), bad


def _sort_descending(weights: Tensor) -> Tensor:
    """Sort each row of ``weights`` in descending order."""
    if weights.device.type != "cpu":
        return weights.sort(-1, descending=True).values
    # NOTE: numpy's vectorised sort is 7 to 18 times faster than torch.sort on a CPU (torch also
    # sorts indices).
    return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)


def cutoff(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest weight float32 [N] that survives top-k and then top-p.

    Top-p applies to what top-k left. Ties survive together.

    Args:
        weights: float32 [N, V] >= 0, unnormalised
        top_k: int64 [N]; 0: off
        top_p: float32 [N] in (0, 1]; 1: off
    """
    chunks = zip(
        weights.split(SORT_ROWS), top_k.split(SORT_ROWS), top_p.split(SORT_ROWS), strict=True
    )
    return torch.cat([_cutoff(*chunk) for chunk in chunks])


def _cutoff(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Compute ``cutoff`` for at most SORT_ROWS rows."""
    vocab = weights.shape[1]
    ordered = _sort_descending(weights)
    last = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)[:, None] - 1
    kth = ordered.gather(1, last)
    tied_last = (ordered >= kth).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    mass = ordered.cumsum(-1, dtype=torch.float64)
    wanted = top_p.double()[:, None] * mass.gather(1, tied_last)
    enough = torch.minimum((mass < wanted).sum(-1, keepdim=True), tied_last)
    least = torch.where(top_k[:, None] > 0, kth, 0.0)
    return torch.where(top_p[:, None] < 1.0, ordered.gather(1, enough), least).squeeze(1)


def apply_penalties(
    logits: Tensor,
    seen: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Penalise logits float32 [N, V] in place and return them.

    Repetition divides positive and multiplies negative logits of seen tokens (Keskar et al. 2019).
    Frequency and presence are OpenAI's: ``logit - count * frequency - (count > 0) * presence``.

    Args:
        logits: float32 [N, V]
        seen: bool [N, V]: the token is in the prompt or the output
        counts: int32 [N, V]: occurrences in the output
        repetition: [N]
        frequency: [N]
        presence: [N]
    """
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits.sub_(counts * frequency[:, None])
    return logits.sub_((counts > 0) * presence[:, None])


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of ``tokens`` and of the k most likely tokens, best first.

    They are taken from ``log_softmax(logits)``, in chunks of rows, so that temporaries stay small
    for a long prompt.

    Args:
        logits: float32 [N, V]
        tokens: int64 [N]
        k: number of most likely tokens

    Returns:
        token float32 [N], top_ids int64 [N, k] and top float32 [N, k]
    """
    chunks = zip(logits.split(LOGPROB_ROWS), tokens.split(LOGPROB_ROWS), strict=True)
    parts = [_token_logprobs(*chunk, k) for chunk in chunks]
    token, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return token, top_ids, top


def _token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``token_logprobs`` for at most LOGPROB_ROWS rows."""
    logits = logits.float()
    norm = logits.logsumexp(-1, keepdim=True)
    top, top_ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    return (logits.gather(1, tokens[:, None]) - norm).squeeze(1), top_ids, top - norm


# ---- masks of allowed tokens ---------------------------------------------------------------------


def forbid(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the logits of tokens without a bit in their row's mask to minus infinity, in place.

    Args:
        logits: float32 [N, V].
        rows: rows of ``logits``, ascending, int64 [n].
        masks: int32 [n, words], 32 tokens each; bit t % 32 of word t // 32 allows token t.
    """
    if logits.device.type == "cpu":
        _forbid_on_host(logits.numpy(), rows.numpy(), masks.numpy())
        return
    vocab = logits.shape[1]
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=masks.device)
    for at in range(0, len(rows), MASK_ROWS):
        words = masks[at : at + MASK_ROWS].view(torch.uint8)
        absent = (words[:, :, None] & powers == 0).view(len(words), -1)[:, :vocab]
        chosen = rows[at : at + MASK_ROWS]
        logits[chosen] = logits[chosen].masked_fill(absent, float("-inf"))


#: infinity for the bits of a byte that are set, minus infinity for the others, lowest bits first
MOST = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.inf, -np.inf).astype(np.float32)


def _forbid_on_host(
    logits: NDArray[np.float32], rows: NDArray[np.int64], masks: NDArray[np.int32]
) -> None:
    """Do the work of ``forbid`` with numpy.

    NOTE: 32 masks of 2048 tokens on one core take 20 us; ``masked_fill_`` takes 40 to 270, because
    it branches.
    """
    count, vocab = logits.shape
    for at in range(0, len(rows), MASK_ROWS):
        words = masks[at : at + MASK_ROWS]
        most = MOST.take(words.view(np.uint8), axis=0).reshape(len(words), -1)[:, :vocab]
        if len(words) == count:
            np.minimum(logits, most, out=logits)
        else:
            chosen = rows[at : at + MASK_ROWS]
            logits[chosen] = np.minimum(logits[chosen], most)
