"""Simulated acceptance: the mean and the rates per position are those asked for, in chains and
trees, whatever the target drew.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glowplug.core.speculation.simulated import simulated_draws, uniform
from glowplug.core.speculation.verify import accept_chain
from glowplug.core.step.draft_counts import rates_of_length

ROWS = 4000
VOCAB = 11  # few tokens, so that the target's own tokens often equal the drafts


def step(width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the target's tokens, the step's input, keys and positions of random rows."""
    made = torch.Generator().manual_seed(seed)
    drawn, fed = (torch.randint(VOCAB, (ROWS, width), generator=made) for _ in range(2))
    keys = torch.randint(1 << 62, (ROWS,), generator=made)
    return drawn, fed, keys, torch.randint(4096, (ROWS,), generator=made)


def shares(*rates: float) -> Tensor:
    """Return the probabilities that a row accepts more than 0, 1 and so on of its drafts."""
    return torch.tensor(rates, dtype=torch.float64).cumprod(0)


def accepted_drafts(width: int, rates: tuple[float, ...], seed: int = 0) -> Tensor:
    """Return the number of drafts that each row of a chain accepts."""
    drawn, fed, keys, positions = step(width, seed)
    found = simulated_draws(drawn, fed, None, shares(*rates[: width - 1]), keys, positions)
    assert (found[:, -1] == drawn[:, -1]).all() and found.min() >= 0 and found.max() < VOCAB
    return accept_chain(found, fed[:, 1:]) - 1


@pytest.mark.parametrize("length", [1.0, 1.4, 1.85, 2.0, 2.6, 3.999, 4.0])
def test_the_mean_gain_is_the_given_length(length: int) -> None:
    gains = 1 + accepted_drafts(4, rates_of_length(length))
    assert gains.double().mean().item() == pytest.approx(length, abs=0.03)
    assert {int(length), int(length - 1e-9) + 1} >= set(gains.tolist()), "the smallest variance"


def test_rates_per_position_are_the_given_ones() -> None:
    rates = (0.8, 0.5, 0.9)
    accepted = accepted_drafts(5, rates)
    for place, rate in enumerate(rates):
        reached = accepted[accepted >= place]
        assert (reached > place).double().mean().item() == pytest.approx(rate, abs=0.04), place
    assert accepted.max() == 3, "drafts without a rate are rejected"


def test_a_narrower_step_uses_the_first_rates() -> None:
    assert accepted_drafts(2, (0.5, 1.0, 1.0)).double().mean().item() == pytest.approx(
        0.5, abs=0.03
    )


def test_numbers_depend_on_key_and_position_only() -> None:
    drawn, fed, keys, positions = step(4)
    given = shares(0.7, 0.7, 0.7)
    whole = simulated_draws(drawn, fed, None, given, keys, positions)
    part = simulated_draws(drawn[7:9], fed[7:9], None, given, keys[7:9], positions[7:9])
    assert (whole[7:9] == part).all()


def test_consecutive_keys_and_positions_are_independent() -> None:
    numbers = uniform(torch.arange(300)[:, None], torch.arange(400))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.01)
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        pairs = torch.stack([one.flatten(), other.flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 0.02


#: trees of six tokens: two branches of unlike depth; the first child is a leaf; a chain
TREES = {
    "branches": ((0, 0, 0, 1, 1, 3), 3),
    "leaf first": ((0, 0, 0, 2, 3, 4), 1),
    "chain": ((0, 0, 1, 2, 3, 4), 5),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_accept_their_first_children(name: str) -> None:
    """The walk from the root follows the first children for the drawn number of drafts, and ends
    there although the target may have drawn another child.
    """
    parents, longest = TREES[name]
    drawn, fed, keys, positions = step(6)
    rates = (0.9, 0.8, 0.7, 0.6, 0.5)
    # siblings differ
    fed = (fed[:, :1] + torch.arange(6)) % VOCAB
    tree = torch.tensor(parents).expand_as(fed)
    found = simulated_draws(drawn, fed, tree, shares(*rates), keys, positions)
    chain = simulated_draws(drawn, fed, None, shares(*rates), keys, positions)
    wanted = (accept_chain(chain, fed[:, 1:]) - 1).clamp(max=longest).tolist()
    for row in range(500):
        node, gained = 0, 0
        while True:
            children = [n for n in range(1, 6) if parents[n] == node]
            following = [n for n in children if fed[row, n] == found[row, node]]
            if not following:
                break
            assert following == children[:1]
            node, gained = following[0], gained + 1
        assert gained == wanted[row]


def test_lengths_below_one_have_no_rates() -> None:
    assert rates_of_length(1.0) == (0.0,)
    assert rates_of_length(2.6) == (1.0, 0.6)
    assert rates_of_length(3.0) == (1.0, 1.0)
    for length in (0.99, float("nan")):
        with pytest.raises(ValueError, match="at least 1"):
            rates_of_length(length)
