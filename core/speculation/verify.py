"""Verification of drafts that form a chain, once the target has scored them.

The sampler draws the target's own token at every position with the noise of that position, and a
draft is accepted if it equals that token. The output is therefore, token for token, what steps of
width one would have drawn. Since a draft is a single proposal (a point mass), it is accepted
exactly as often as under rejection sampling (Leviathan et al. 2023).

D is the number of decode rows, W the width, B the number of rows, and N that of the logits' rows.
Everything stays on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.protocols import Sampled, Sampler
from glowplug.core.step.batch import Accepted, Batch, LogprobTensors


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
    """Return for each position the drafts up to it, int64 [D * W, W - 1]; -1 for later drafts.

    Args:
        fed: The step's input tokens, int64 [D, W].
    """
    rows, width = fed.shape
    seen = torch.ones(width, width - 1, dtype=torch.bool, device=fed.device).tril_(-1)
    return fed[:, None, 1:].masked_fill(~seen, -1).view(rows * width, width - 1)


def verify_chain(
    logits: Tensor, batch: Batch, width: int, ends: Tensor | None, sampler: Sampler
) -> Accepted:
    """Sample the target's tokens for a step, and accept the drafts that equal them.

    Tokens are sampled at every position of the decode rows and at the end of finished prompts.

    The accepted tokens are passed on to ``sampler.observe``.

    Args:
        logits: [N, V], of the decode rows' positions and then of the finished prompts.
        batch: The target's step.
        width: W, the number of tokens that a decode row computes.
        ends: Indices in the batch of the rows whose prompts ended, int64; None if all rows decode.
        sampler: The sampler.
    """
    rows = batch.num_decodes
    count = rows * width
    fed = batch.input_ids[:count].view(rows, width)
    owners = batch.row_ids[:rows, None].expand(rows, width).reshape(-1)
    positions = batch.positions[:count] + 1
    before = chain_before(fed)
    if ends is not None:
        owners = torch.cat([owners, batch.row_ids[ends]])
        positions = torch.cat([positions, batch.kv_lens_device[ends]])
        before = torch.cat([before, before.new_full((len(ends), width - 1), -1)])
    sampled = sampler.sample(logits, owners, positions, before)
    if batch.simulated is not None:
        sampled = batch.simulated.apply(sampled, fed, batch)
    drawn = sampled.tokens[:count].view(rows, width)
    counts = accept_chain(drawn, fed[:, 1:])
    kept = torch.arange(width, device=counts.device) < counts[:, None]
    bad = (sampled.bad[:count].view(rows, width) & kept).any(1)
    accepted = Accepted(drawn, counts, bad, sampled.logprobs)
    if ends is not None:
        accepted = _with_ends(accepted, sampled, ends, batch.num_rows)
    sampler.observe(accepted.tokens, accepted.counts, batch.row_ids)
    return accepted


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
