"""Simulated acceptance of drafts, for benchmarks on checkpoints whose drafts have no meaning.

The tokens that the target drew along a row's first drafts are replaced by the drafts themselves, so
that verification accepts a chosen number of them. The answers are meaningless; the work of a step
and the tokens that it gains are those of an engine with this acceptance.

D is the number of decode rows, W the width. Everything stays on the device, and every rank draws
the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Sampled, Worker
from glowplug.core.step.batch import Batch
from glowplug.core.step.request import SamplingParams

#: odd constants of SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
BITS = 32  #: bits of a uniform number

#: ``chain_draws``, or a kernel with the same result
ChainDraws = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def simulated_draws(
    drawn: Tensor,
    fed: Tensor,
    parents: Tensor | None,
    shares: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return ``drawn`` with the tokens replaced by which a simulated number of drafts is accepted.

    A row accepts the first n drafts of the chain of first children of its tree, and no other. n
    exceeds i with probability ``shares[i]``; it is drawn from a hash of key and position.

    Args:
        drawn: Tokens that the target drew after each token of the step, int64 [D, W].
        fed: The step's input tokens, int64 [D, W].
        parents: Index of each token's parent in its row, int64 [D, W]; None for chains.
        shares: float64 [P], at most W - 1. Drafts behind the first P are rejected.
        keys: Keys of the rows, int64 [D].
        positions: Positions of the rows' newest tokens, int64 [D].
    """
    if parents is None:
        return chain_draws(drawn, fed, shares, keys, positions)
    return _tree_draws(drawn, fed, parents, accepted_drafts(shares, keys, positions), len(shares))


def accepted_drafts(shares: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Return the number of drafts that each row accepts, int64 [D].

    Arguments as in :func:`simulated_draws`.
    """
    return (uniform(keys, positions)[:, None] < shares).sum(1)


def chain_draws(
    drawn: Tensor, fed: Tensor, shares: Tensor, keys: Tensor, positions: Tensor
) -> Tensor:
    """Return the result of :func:`simulated_draws` for chains; arguments as there."""
    accepted = accepted_drafts(shares, keys, positions)
    drafts = fed[:, 1:]
    after = drawn[:, :-1]
    places = torch.arange(drafts.shape[1], device=fed.device)
    unlike = torch.where(after == drafts, (after - 1).abs(), after)
    return torch.cat(
        [torch.where(places < accepted[:, None], drafts, unlike), drawn[:, -1:]], dim=1
    )


def _tree_draws(
    drawn: Tensor, fed: Tensor, parents: Tensor, accepted: Tensor, depth: int
) -> Tensor:
    """Return ``drawn`` changed so that the first ``accepted`` [D] first children equal it.

    The token at the last of them is changed as well if it equals one of its children.
    """
    places = torch.arange(fed.shape[1], device=fed.device)
    node = torch.zeros_like(accepted)[:, None]
    for number in range(depth):
        children = (parents == node) & (places > 0)
        child = children.int().argmax(1, keepdim=True)
        moves = (accepted[:, None] > number) & children.any(1, keepdim=True)
        token = torch.where(moves, fed.gather(1, child), drawn.gather(1, node))
        drawn = drawn.scatter(1, node, token)
        node = torch.where(moves, child, node)
    return _unlike_children(drawn, fed, (parents == node) & (places > 0), node)


def _unlike_children(drawn: Tensor, fed: Tensor, children: Tensor, node: Tensor) -> Tensor:
    """Return ``drawn`` with the token of each row's ``node`` changed if it equals a child.

    It becomes the smallest token id that no child has; W ids are always enough.

    Args:
        drawn: int64 [D, W].
        fed: int64 [D, W].
        children: bool [D, W], the children of ``node``.
        node: int64 [D, 1].
    """
    places = torch.arange(fed.shape[1], device=fed.device)
    taken = ((fed[:, :, None] == places) & children[:, :, None]).any(1)
    free = (~taken).int().argmax(1, keepdim=True)
    last = drawn.gather(1, node)
    equal = (children & (fed == last)).any(1, keepdim=True)
    return drawn.scatter(1, node, torch.where(equal, free, last))


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return float64 numbers in [0, 1) that depend only on key and position, both int64 [...].

    NOTE: few operations, since they are part of the measured step: torch's shift extends the sign,
    which a hash can bear.
    """
    state = torch.add(keys, positions, alpha=GOLDEN)
    state = (state ^ (state >> 30)) * MIX_1
    state = (state ^ (state >> 27)) * MIX_2
    return (state >> (64 - BITS)).double() * 2.0**-BITS + 0.5


class SimulatedAcceptance:
    """The simulated acceptance of an engine: its rates and the keys of its rows.

    Args:
        rates: Probability of each draft to be accepted if those before it are.
        rows: Number of rows of the sequence table, that of padding rows included.
        device: Where the steps run.

    Attributes:
        chain_draws: Simulates steps over chains. Algorithms that have a kernel for it replace it.
    """

    def __init__(self, rates: Sequence[float], rows: int, device: torch.device) -> None:
        self.chain_draws: ChainDraws = chain_draws
        self._shares = torch.zeros(len(rates), dtype=torch.float64, device=device)
        self._keys = torch.zeros(rows, dtype=torch.int64, device=device)
        self.change(rates)

    def change(self, rates: Sequence[float]) -> None:
        """Set the probabilities of the first drafts; those behind them are rejected."""
        given = [*rates, *[0.0] * (len(self._shares) - len(rates))]
        self._shares.copy_(torch.tensor(given, dtype=torch.float64).cumprod(0))

    def join(self, row: int, params: SamplingParams) -> None:
        """Set the key of ``row`` from the seed of the sequence that enters it."""
        mixed = (params.seed or 0) * MIX_1
        self._keys[row] = (mixed + (1 << 63)) % (1 << 64) - (1 << 63)

    def apply(self, sampled: Sampled, fed: Tensor, batch: Batch) -> Sampled:
        """Return ``sampled`` with simulated tokens of the decode rows.

        Args:
            sampled: The target's tokens; those of the decode rows come first, W of each.
            fed: The step's input tokens, int64 [D, W].
            batch: The target's step, with exact positions.
        """
        rows, width = fed.shape
        count = rows * width
        drawn = sampled.tokens[:count].view(rows, width)
        keys = self._keys[batch.row_ids[:rows]]
        at = self._shares[: width - 1], keys, batch.positions[:count].view(rows, width)[:, 0]
        if batch.tree is None:
            tokens = self.chain_draws(drawn, fed, *at).view(-1)
        else:
            tokens = simulated_draws(drawn, fed, batch.tree.parents, *at).view(-1)
        if count < len(sampled.tokens):
            tokens = torch.cat([tokens, sampled.tokens[count:]])
        return Sampled(tokens, sampled.bad, sampled.logprobs)


def simulation_of(plan: EnginePlan, worker: Worker) -> SimulatedAcceptance | None:
    """Return the simulated acceptance of a plan on a rank; None if the target decides."""
    rates = plan.choice("speculative").options.get("simulate_accept_rates")
    if rates is None:
        return None
    return SimulatedAcceptance(rates, plan.sizes.max_running + 1, torch.device(worker.device))
