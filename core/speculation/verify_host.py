"""Verification of chains of drafts on the CPU, for steps of decode rows only.

Plain Python and numpy take a third of the time of torch's calls here. R is the number of rows and W
the width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.protocols import Sampled, Sampler
from glowplug.core.step.batch import Accepted, Batch

Long = NDArray[np.int64]


def verify_chain_host(logits: Tensor, batch: Batch, width: int, sampler: Sampler) -> Accepted:
    """Do the work of ``verify.verify`` on the host, for R decode rows only.

    ``logits``: [R * W, V].
    """
    rows = batch.num_rows
    fed: Long = batch.input_ids.numpy().reshape(rows, width)
    sampled = _sampled(logits, batch, fed, sampler)
    drawn: Long = sampled.tokens.numpy().reshape(rows, width)
    counts = _counts(drawn, fed, batch)
    bad = sampled.bad.numpy().reshape(rows, width)
    bad = np.array(
        [bool(row[:count].any()) for row, count in zip(bad, counts.tolist(), strict=True)]
    )
    accepted = Accepted(
        torch.from_numpy(drawn), torch.from_numpy(counts), torch.from_numpy(bad), sampled.logprobs
    )
    sampler.observe(accepted.tokens, accepted.counts, batch.row_ids)
    return accepted


def _sampled(logits: Tensor, batch: Batch, fed: Long, sampler: Sampler) -> Sampled:
    """Return the target's tokens after every token ``fed``, int64 [R, W]."""
    rows, width = fed.shape
    places = np.arange(width)
    before = np.where(places[1:] <= places[:, None], fed[:, None, 1:], -1).reshape(
        rows * width, width - 1
    )
    owners: Long = batch.row_ids.numpy().repeat(width)
    sampled = sampler.sample(
        logits, torch.from_numpy(owners), batch.positions + 1, torch.from_numpy(before)
    )
    if batch.simulated is None:
        return sampled
    simulated: Sampled = batch.simulated.apply(sampled, torch.from_numpy(fed), batch)
    return simulated


def _counts(drawn: Long, fed: Long, batch: Batch) -> NDArray[np.int32]:
    """Return the number of tokens that each row gains, int32 [R].

    ``drawn`` and ``fed``: the tokens drawn by the target and its input tokens, [R, W].
    """
    pairs = zip(drawn.tolist(), fed.tolist(), strict=True)
    counts: NDArray[np.int32] = np.array([_accepted(*pair) for pair in pairs], np.int32)
    if batch.draft_counts is not None:
        np.minimum(counts, batch.draft_counts.numpy() + 1, out=counts)
    return counts


def _accepted(drawn: list[int], fed: list[int]) -> int:
    """Return the number of tokens that a row gains: its accepted drafts plus one.

    Args:
        drawn: the tokens that the target sampled, W of them.
        fed: the input tokens of the step: the newest token, then W - 1 drafts.
    """
    count = 1
    while count < len(fed) and drawn[count - 1] == fed[count]:
        count += 1
    return count
