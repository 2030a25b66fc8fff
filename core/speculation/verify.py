"""Verification of drafts, once the target has scored them.

The sampler draws the target's own token after every token of a step, with the noise of its
position, and a draft is accepted if it equals the token drawn after its accepted parent. The output
is therefore, token for token, what steps of width one would have drawn. Since a draft is a single
proposal (a point mass), it is accepted exactly as often as under rejection sampling (Leviathan et
al. 2023); of several siblings at most one equals the drawn token.

D is the number of decode rows, W the width, B the number of rows, and N that of the logits' rows.
Everything stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from glowplug.core.protocols import Sampled, Sampler
from glowplug.core.step.batch import Accepted, Batch, LogprobTensors
from glowplug.core.step.draft_tree import DraftTree

#: function of the sampled tokens and the input tokens [D, W] that returns the numbers of tokens
#: that the rows gain, int32 [D], and whether their logits were not finite, bool [D]
Gain = Callable[[Sampled, Tensor], tuple[Tensor, Tensor]]


def verify(
    logits: Tensor,
    batch: Batch,
    width: int,
    ends: Tensor | None,
    sampler: Sampler,
    gain: Gain | None = None,
) -> Accepted:
    """Sample the target's tokens for a step, and accept the drafts that equal them.

    Tokens are sampled after every token of the decode rows and at the end of finished prompts. The
    accepted tokens are passed on to ``sampler.observe``.

    Args:
        logits: [N, V], of the decode rows' tokens and then of the finished prompts.
        batch: The target's step; ``batch.tree`` has the trees of its decode rows.
        width: W, the number of tokens that a decode row computes.
        ends: Indices in the batch of the rows whose prompts ended, int64; None if all rows decode.
        sampler: The sampler.
        gain: Accepts the drafts of a step over chains without prompts, with the result of
            :func:`accept_chain`; None: this function does.
    """
    if width == 1 and ends is None and gain is None:
        return _plain(logits, batch, sampler)
    rows = batch.num_decodes
    fed = batch.input_ids[: rows * width].view(rows, width)
    sampled = _sampled(logits, batch, fed, ends, sampler)
    if gain is not None:
        return _with_gain(gain, sampled, fed, batch, sampler)
    drawn = sampled.tokens[: rows * width].view(rows, width)
    counts, path = _accepted(drawn, fed, batch)
    if path is not None:
        sampled = _along(sampled, path)
    accepted = _gained(sampled, counts, width)
    if ends is not None:
        accepted = _with_ends(accepted, sampled, ends, batch.num_rows)
    sampler.observe(accepted.tokens, accepted.counts, batch.row_ids)
    accepted.path = path
    return accepted


def _plain(logits: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
    """Return the tokens that decode rows without drafts gain: one each."""
    rows = batch.row_ids[: batch.num_decodes]
    sampled = sampler.sample(logits, rows, batch.positions[: len(rows)] + 1)
    tokens = sampled.tokens[:, None]
    counts = torch.ones(len(rows), dtype=torch.int32, device=rows.device)
    sampler.observe(tokens, counts, batch.row_ids)
    return Accepted(tokens, counts, sampled.bad, sampled.logprobs)


def _accepted(drawn: Tensor, fed: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the number of tokens that each row gains, int32 [D], and ``Accepted.path``.

    ``drawn`` and ``fed``: the tokens drawn by the target and its input tokens, int64 [D, W].
    """
    given: Tensor | None = batch.draft_counts
    if given is not None:
        # of the tokens behind a row's drafts none is accepted, since no drawn token is negative
        fed = fed.where(torch.arange(fed.shape[1], device=fed.device) <= given[:, None], -1)
    tree = batch.tree
    if tree is None:
        return accept_chain(drawn, fed[:, 1:]), None
    kept = accept_tree(drawn, fed, tree)
    return kept.sum(1, dtype=torch.int32), accepted_path(kept, tree.depths)


def _with_gain(
    gain: Gain, sampled: Sampled, fed: Tensor, batch: Batch, sampler: Sampler
) -> Accepted:
    """Return the tokens that decode rows gain by ``gain``, and pass them on to the sampler."""
    chains = batch.tree is None and batch.num_decodes == batch.num_rows
    assert chains, "only chains of decode rows have other gains"
    assert batch.draft_counts is None, "rows of other gains all have as many drafts"
    drawn = sampled.tokens.view(fed.shape)
    accepted = Accepted(drawn, *gain(sampled, fed), sampled.logprobs)
    sampler.observe(drawn, accepted.counts, batch.row_ids)
    return accepted


def _gained(sampled: Sampled, counts: Tensor, width: int) -> Accepted:
    """Return the tokens that the decode rows gain: the first ``counts`` of the W of each row."""
    grid = (len(counts), width)
    kept = torch.arange(width, device=counts.device) < counts[:, None]
    bad = sampled.bad[: kept.numel()].view(grid) & kept
    return Accepted(sampled.tokens[: kept.numel()].view(grid), counts, bad.any(1), sampled.logprobs)


def _sampled(
    logits: Tensor, batch: Batch, fed: Tensor, ends: Tensor | None, sampler: Sampler
) -> Sampled:
    """Return the target's tokens after every token ``fed`` [D, W] and at the ends of prompts."""
    rows, width = fed.shape
    owners = batch.row_ids[:rows, None].expand(rows, width).reshape(-1)
    positions = batch.positions[: rows * width] + 1
    before = chain_before(fed) if batch.tree is None else tree_before(fed, batch.tree)
    if ends is not None:
        owners = torch.cat([owners, batch.row_ids[ends]])
        positions = torch.cat([positions, batch.kv_lens_device[ends]])
        before = torch.cat([before, before.new_full((len(ends), width - 1), -1)])
    sampled = sampler.sample(logits, owners, positions, before if width > 1 else None)
    return sampled if batch.simulated is None else batch.simulated.apply(sampled, fed, batch)


# ---- chains --------------------------------------------------------------------------------------


def accept_chain(drawn: Tensor, drafts: Tensor) -> Tensor:
    """Return the number of tokens that each decode row gains, int32 [D], from 1 to W.

    A row gains its accepted drafts and the token that the target sampled after them.

    Args:
        drawn: The tokens that the target sampled, int64 [D, W].
        drafts: The drafts at positions 1 to W - 1, int64 [D, W - 1].
    """
    return (drawn[:, :-1] == drafts).cumprod(1).sum(1, dtype=torch.int32) + 1


def accept_chain_reference(drawn: list[list[int]], drafts: list[list[int]]) -> list[int]:
    """Return the result of :func:`accept_chain`, computed in plain Python."""
    counts = []
    for tokens, row in zip(drawn, drafts, strict=True):
        count = 1
        while count <= len(row) and row[count - 1] == tokens[count - 1]:
            count += 1
        counts.append(count)
    return counts


def chain_before(fed: Tensor) -> Tensor:
    """Return for each token the drafts up to it, int64 [D * W, W - 1]; -1 for later drafts.

    Args:
        fed: The step's input tokens, int64 [D, W].
    """
    rows, width = fed.shape
    return fed[:, None, 1:].masked_fill(_later(width, fed.device), -1).view(rows * width, width - 1)


@cache
def _later(width: int, device: torch.device) -> Tensor:
    """Return which drafts of a chain follow each of its tokens, bool [W, W - 1]."""
    return torch.ones(width, width - 1, dtype=torch.bool, device=device).triu_()


# ---- trees ---------------------------------------------------------------------------------------


def accept_tree(drawn: Tensor, fed: Tensor, tree: DraftTree) -> Tensor:
    """Return which tokens of a step are accepted, bool [D, W]; token 0 of a row always is.

    Args:
        drawn: The tokens that the target sampled after each token of the step, int64 [D, W].
        fed: The step's input tokens, int64 [D, W].
        tree: The trees of the rows.
    """
    equal = drawn.gather(1, tree.parents) == fed
    equal[:, 0] = True
    places = torch.arange(fed.shape[1], device=fed.device)
    # the bits of distinct places, so their sum is their union
    found = (equal.long() << places).sum(1, keepdim=True)
    return (tree.mask & ~found) == 0


def accepted_path(kept: Tensor, depths: Tensor) -> Tensor:
    """Return ``Accepted.path`` of the accepted tokens ``kept``, bool [D, W].

    ``depths``: int64 [D, W]; the accepted tokens of a row have the depths 0, 1, 2 and so on.
    """
    rows, width = kept.shape
    places = torch.arange(width, device=kept.device).expand(rows, width)
    path = torch.arange(width + 1, device=kept.device).repeat(rows, 1)
    # rejected tokens are written to the surplus last column
    return path.scatter_(1, depths.masked_fill(~kept, width), places)[:, :width].contiguous()


def accepted_path_reference(drawn: list[int], fed: list[int], parents: list[int]) -> list[int]:
    """Return the accepted tokens of one row in order, found by a walk from the root of its tree.

    Args:
        drawn: The tokens that the target sampled after each token of the row, W of them.
        fed: The row's input tokens.
        parents: Index of each token's parent.
    """
    path = [0]
    while True:
        children = [node for node in range(1, len(fed)) if parents[node] == path[-1]]
        found = [node for node in children if fed[node] == drawn[path[-1]]]
        if not found:
            return path
        path.append(found[0])


def tree_before(fed: Tensor, tree: DraftTree) -> Tensor:
    """Return for each token the drafts on its path, itself included, int64 [D * W, W - 1].

    All other entries are -1.

    Args:
        fed: The step's input tokens, int64 [D, W].
        tree: The trees of the rows.
    """
    rows, width = fed.shape
    places = torch.arange(1, width, device=fed.device)
    seen = (tree.mask[:, :, None] >> places & 1).bool()
    return fed[:, None, 1:].masked_fill(~seen, -1).view(rows * width, width - 1)


def _along(sampled: Sampled, path: Tensor) -> Sampled:
    """Return ``sampled`` with the entries of the decode rows in the order of ``path`` [D, W]."""
    rows, width = path.shape
    index = (path + torch.arange(0, rows * width, width, device=path.device)[:, None]).view(-1)
    count = rows * width

    def ordered(part: Tensor) -> Tensor:
        return torch.cat([part[index], part[count:]])

    scores = sampled.logprobs
    return Sampled(
        ordered(sampled.tokens),
        ordered(sampled.bad),
        None
        if scores is None
        else LogprobTensors(ordered(scores.token), ordered(scores.top_ids), ordered(scores.top)),
    )


# ---- rows whose prompt ended ---------------------------------------------------------------------


def _with_ends(decoded: Accepted, sampled: Sampled, ends: Tensor, size: int) -> Accepted:
    """Return the accepted tokens of all ``size`` rows of the step.

    Decode rows keep their tokens in ``decoded``. The rows ``ends``, whose prompt ended, get the one
    token in ``sampled``. All other rows get none.
    """
    rows, width = decoded.tokens.shape
    first = torch.arange(rows * width, device=ends.device)
    tokens = sampled.tokens
    cells = torch.cat([first, ends * width])
    places = torch.cat([first[:rows], ends])
    one = torch.ones(len(ends), dtype=torch.int32, device=ends.device)
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = LogprobTensors(
            *(
                spread(part, cells, size * width)
                for part in (logprobs.token, logprobs.top_ids, logprobs.top)
            )
        )
    return Accepted(
        spread(tokens, cells, size * width).view(size, width),
        spread(torch.cat([decoded.counts, one]), places, size),
        spread(torch.cat([decoded.bad, sampled.bad[rows * width :]]), places, size),
        logprobs,
    )


def spread(values: Tensor, where: Tensor, size: int) -> Tensor:
    """Return zeros [size, ...] with ``values`` [N, ...] at the indices ``where``, int64 [N]."""
    return values.new_zeros(size, *values.shape[1:]).index_copy_(0, where, values)
