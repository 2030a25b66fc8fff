"""Forced tokens as drafts: placed by the token that the step before ended with."""

from __future__ import annotations

import torch

from glowplug.core.speculation.forced_drafts import ForcedDrafts


def drafted(rows: int = 3, width: int = 4) -> torch.Tensor:
    return torch.arange(rows * width).view(rows, width) + 100


def test_the_place_where_a_row_ended_chooses_its_tokens() -> None:
    forced = ForcedDrafts(3)
    forced.add(0, 0, [1, 2, 3, 4, 5])  # the step draws 1, drafts may be 2, 3 and 4
    forced.add(0, 1, [7])  # nothing follows what the step draws
    forced.add(2, 0, [8, 9])
    forced.add(2, 2, [5, 6])
    forced.keep([10, 11, 12], torch.tensor([1, 1, 3], dtype=torch.int32))
    chains = drafted()
    forced.offer(chains, [12, 11, 10])  # the rows have another order now
    wanted = drafted()
    wanted[0, 1] = 6
    wanted[2, 1:] = torch.tensor([2, 3, 4])
    assert torch.equal(chains, wanted)
    forced.offer(chains, [12, 11, 10])
    assert torch.equal(chains, wanted), "tokens are offered once"


def test_rows_that_ended_elsewhere_or_changed_keep_their_drafts() -> None:
    for count, dropped, width in ((2, [], 4), (1, [10], 4), (1, [], 1)):
        forced = ForcedDrafts(3)
        forced.add(0, 0, [1, 2])
        forced.keep([10], torch.tensor([count], dtype=torch.int32))
        forced.drop(dropped)
        chains = drafted(1, width)
        forced.offer(chains, [10])
        assert torch.equal(chains, drafted(1, width)), (count, dropped, width)


def test_a_narrower_step_takes_the_first_tokens() -> None:
    forced = ForcedDrafts(3)
    forced.add(0, 0, [1, 2, 3, 4])
    forced.keep([10], torch.tensor([1], dtype=torch.int32))
    chains = drafted(1, 2)
    forced.offer(chains, [10])
    assert chains.tolist() == [[100, 2]]


def test_forced_tokens_are_drafts_of_rows_that_had_fewer() -> None:
    forced = ForcedDrafts(3)
    forced.add(0, 0, [1, 2, 3])  # two drafts
    forced.add(1, 0, [4, 5])  # one
    forced.keep([10, 11, 12], torch.tensor([1, 1, 1], dtype=torch.int32))
    counts = torch.tensor([0, 3, 1], dtype=torch.int32)
    forced.offer(drafted(), [10, 11, 12], counts)
    assert counts.tolist() == [2, 3, 1]
