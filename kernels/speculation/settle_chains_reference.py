"""The end of a step over chains of drafts: acceptance, and the rows' new states.

R is the number of rows of the sequence table, D that of decoding rows, W the tokens that each of
them computes, and H the size of a hidden state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowStates(NamedTuple):
    """The states of rows and pages between steps.

    Attributes:
        tokens: newest token of each row, int64 [R].
        hidden: the target's hidden state of the token before it, [R, H].
        computed: number of tokens of each row in the target's cache, int32 [R].
        page_ends: the target's hidden state of the last token of each page, [pages, H]; page 0 is
            the scratch page.
    """

    tokens: Tensor
    hidden: Tensor
    computed: Tensor
    page_ends: Tensor


class ChainStep(NamedTuple):
    """A target's step over decoding rows.

    Attributes:
        fed: its input tokens, int64 [D, W].
        drawn: the tokens that the target drew after them, int64 [D, W].
        bad: the logits of a token were not finite, bool [D * W].
        rows: rows of the sequence table, int64 [D].
        positions: int64 [D * W].
        kv_slots: int64 [D * W].
        hidden: the target's hidden states, [D * W, H].
    """

    fed: Tensor
    drawn: Tensor
    bad: Tensor
    rows: Tensor
    positions: Tensor
    kv_slots: Tensor
    hidden: Tensor


class Settled(NamedTuple):
    """The result of a step.

    Attributes:
        counts: tokens that each row gained, int32 [D].
        bad: the logits of a gained token were not finite, bool [D].
        tokens: the first W - 1 drawn tokens of each row, int64 [D * (W - 1)].
        positions: their positions, int64 [D * (W - 1)].
        kv_slots: their KV slots, int64 [D * (W - 1)].
        hidden: hidden states of the tokens before them, [D * (W - 1), H].
    """

    counts: Tensor
    bad: Tensor
    tokens: Tensor
    positions: Tensor
    kv_slots: Tensor
    hidden: Tensor


def settle_chains(step: ChainStep, states: RowStates, page_size: int, context: int) -> Settled:
    """Accept the drafts that equal the drawn tokens, and store the states of rows and pages.

    The states of pages that rejected drafts end are stored too; they are overwritten before use.

    Args:
        step: the step.
        states: overwritten for the rows of the step.
        page_size: tokens per page.
        context: most tokens of a row; ``states.computed`` stays within it.
    """
    count, width = step.fed.shape
    grid = (count, width)
    equal = step.drawn[:, :-1] == step.fed[:, 1:]
    counts = equal.cumprod(1).sum(1) + 1
    gained = torch.arange(width) < counts[:, None]
    positions, slots = step.positions.view(grid), step.kv_slots.view(grid)
    newest = torch.arange(count) * width + counts - 1
    states.tokens[step.rows] = step.drawn.flatten()[newest]
    states.hidden[step.rows] = step.hidden[newest].to(states.hidden.dtype)
    lengths = (positions[:, 0] + counts).clamp(max=context)
    states.computed[step.rows] = lengths.int()
    ends = (step.positions + 1) % page_size == 0
    pages = step.kv_slots[ends] // page_size
    states.page_ends[pages] = step.hidden[ends].to(states.page_ends.dtype)
    return Settled(
        counts.int(),
        (step.bad.view(grid) & gained).any(1),
        step.drawn[:, :-1].reshape(-1),
        (positions[:, :1] + torch.arange(1, width)).reshape(-1),
        slots[:, 1:].reshape(-1),
        step.hidden.unflatten(0, grid)[:, :-1].flatten(0, 1),
    )
