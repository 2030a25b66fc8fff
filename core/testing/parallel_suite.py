"""Conformance suites of the ``parallel`` and ``collectives`` slots. Subclass one and define ``make``."""
from __future__ import annotations

import pytest
import torch

from glowplug.core.batch import NO_WORK, StepShape, idle_batch
from glowplug.core.offers import Mode
from glowplug.core.protocols import Collectives, ParallelStrategy, Shard

CUT = ("column", "row", "vocab", "heads", "experts", "expert_width")  #: roles whose parts are disjoint


class ParallelSuite:
    """Every strategy must cut dimensions without gap or overlap, and move no token when it has no work to share."""

    ranks = 1

    def make(self, rank: int) -> ParallelStrategy:
        """The strategy as rank ``rank`` of ``ranks`` holds it."""
        raise NotImplementedError

    def shards(self, role: str, full: int, block: int = 1) -> list[Shard]:
        found = [self.make(rank).shard(role, "model.layers.0.part", full, block) for rank in range(self.ranks)]
        return [Shard(0, full, full) if shard is None else shard for shard in found]

    @pytest.mark.parametrize("role", CUT)
    @pytest.mark.parametrize(("units", "block"), [(64, 1), (64, 128)])
    def test_ranks_hold_everything_once_or_all_of_it(self, role: str, units: int, block: int) -> None:
        full = units * block
        parts = self.shards(role, full, block)
        assert all(part.full == full and part.start % block == 0 for part in parts)
        if all(part.size == full for part in parts):
            assert not any(part.reduce or part.gather for part in parts), "whole on every rank: nothing to add up"
            return
        held = sorted({(part.start, part.size) for part in parts})
        assert held[0][0] == 0 and sum(size for _, size in held) == full
        assert all(start + size == after for (start, size), (after, _) in zip(held, held[1:], strict=False))

    def test_what_is_replicated_stays_whole(self) -> None:
        assert all((part.start, part.size) == (0, 96) for part in self.shards("replicated", 96))

    def test_it_deals_requests_the_same_each_call(self) -> None:
        strategy = self.make(0)
        assert strategy.router() is strategy.router()

    def test_one_rank_agrees_with_itself(self) -> None:
        if self.ranks == 1:
            shape = StepShape(Mode.PREFILL, 3, 40)
            assert self.make(0).agree(shape) == shape and self.make(0).agree(NO_WORK) == NO_WORK

    def test_one_rank_keeps_its_tokens(self) -> None:
        if self.ranks == 1:
            strategy, x, batch = self.make(0), torch.randn(5, 4), idle_batch()
            back = strategy.enter_attention(strategy.leave_attention(x, batch), batch)
            assert torch.equal(back, x)


class CollectivesSuite:
    """What holds for every backend over an axis of size one."""

    def make(self) -> Collectives:
        """The backend of a world of one rank."""
        raise NotImplementedError

    @pytest.fixture
    def collectives(self) -> Collectives:
        return self.make()

    @pytest.mark.parametrize("shape", [(0, 4), (1, 4), (7, 3)])
    def test_one_rank_exchanges_nothing(self, collectives: Collectives, shape: tuple[int, int]) -> None:
        x = torch.randn(shape)
        kept = x.clone()
        for made in (collectives.all_reduce(x, "tp"), collectives.all_gather(x, "tp"),
                     collectives.all_gather(x, "tp", 1), collectives.reduce_scatter(x, "tp"),
                     collectives.all_to_all(x, "tp")):
            assert torch.equal(made, kept)

    def test_rank_0s_bytes_arrive(self, collectives: Collectives) -> None:
        assert collectives.broadcast_bytes(b"\x00frame") == b"\x00frame" and collectives.broadcast_bytes(b"") == b""

    def test_it_closes_twice(self, collectives: Collectives) -> None:
        collectives.close()
        collectives.close()
