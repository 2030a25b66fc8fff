"""Conformance suites of the ``parallel`` and ``collectives`` slots.

Subclass one and define ``make`` (or ``run``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Collectives, ParallelStrategy, Shard
from glowplug.core.step.batch import NO_WORK, StepShape, idle_batch
from glowplug.core.step.request import SamplingParams, Sequence

#: roles whose shards are disjoint
SPLIT_ROLES = (
    "column",
    "row",
    "vocab",
    "heads",
    "experts",
    "expert_width",
    "shared_column",
    "shared_row",
    "heads_row",
)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)  #: dtypes that collectives must support


class ParallelSuite:
    """Tests that every parallelism strategy must pass.

    A strategy splits dimensions without gap or overlap, and moves no token on a single rank.

    Attributes:
        ranks: number of ranks that the strategy is built for.
    """

    ranks = 1

    def make(self, rank: int) -> ParallelStrategy:
        """Return the strategy as built on rank ``rank`` of ``ranks``."""
        raise NotImplementedError

    def shards(self, role: str, full: int, block: int = 1) -> list[Shard]:
        """Return the shard of each rank; the whole dimension if the strategy has none."""
        found = [
            self.make(rank).shard(role, "model.layers.0.part", full, block)
            for rank in range(self.ranks)
        ]
        return [Shard(0, full, full) if shard is None else shard for shard in found]

    @pytest.mark.parametrize("role", SPLIT_ROLES)
    @pytest.mark.parametrize(("units", "block"), [(64, 1), (64, 128)])
    def test_ranks_hold_everything_once_or_all_of_it(
        self, role: str, units: int, block: int
    ) -> None:
        full = units * block
        parts = self.shards(role, full, block)
        assert all(part.full == full and part.start % block == 0 for part in parts)
        if all(part.size == full for part in parts):
            assert not any(part.reduce or part.gather for part in parts), (
                "nothing to reduce or gather: the dimension is whole on every rank"
            )
            return
        held = sorted({(part.start, part.size) for part in parts})
        assert held[0][0] == 0 and sum(size for _, size in held) == full
        assert all(
            start + size == after for (start, size), (after, _) in zip(held, held[1:], strict=False)
        )

    def test_listed_experts_are_all_held(self) -> None:
        """Ranks that list their experts hold equally many, none twice, and all of them together."""
        lists = [
            getattr(self.make(rank), "held_experts", lambda name, experts: None)("model.moe", 64)
            for rank in range(self.ranks)
        ]
        listed = [held for held in lists if held is not None]
        assert len(listed) in (0, self.ranks)
        assert len({len(held) for held in listed}) <= 1
        assert all(len(set(held)) == len(held) for held in listed)
        assert not listed or {expert for held in listed for expert in held} == set(range(64))

    def test_what_is_replicated_stays_whole(self) -> None:
        assert all((part.start, part.size) == (0, 96) for part in self.shards("replicated", 96))

    def test_it_deals_requests_the_same_each_call(self) -> None:
        strategy = self.make(0)
        assert strategy.router() is strategy.router()

    def test_every_rank_deals_a_request_to_the_same_group(self) -> None:
        routers = [self.make(rank).router() for rank in range(self.ranks)]
        found = [router for router in routers if router is not None]
        assert len(found) in (0, self.ranks)
        for router in found:
            router.shares = True
        for length in (1, 40, 40, 7, 900, 40):
            prompt = np.arange(length, dtype=np.int32)
            params = SamplingParams(max_tokens=4)
            owners = {
                router.group
                for router in found
                if router.owns(Sequence(id=length, prompt=prompt, params=params))
            }
            assert len(owners) == bool(found)
            if length == 7:
                for router in found:
                    router.forget_prefixes()

    def test_one_rank_agrees_with_itself(self) -> None:
        if self.ranks == 1:
            shape = StepShape(Mode.PREFILL, 3, 40)
            assert self.make(0).agree(shape) == shape and self.make(0).agree(NO_WORK) == NO_WORK

    def test_one_rank_keeps_its_tokens(self) -> None:
        if self.ranks == 1:
            strategy = self.make(0)
            x = torch.randn(5, 4)
            batch = idle_batch()
            back = strategy.enter_attention(strategy.leave_attention(x, batch), batch)
            assert torch.equal(back, x)


class CollectivesSuite:
    """Tests that every backend must pass over an axis of size one."""

    def make(self) -> Collectives:
        """Return the backend of a world of one rank."""
        raise NotImplementedError

    @pytest.fixture
    def collectives(self) -> Collectives:
        return self.make()

    @pytest.mark.parametrize("shape", [(0, 4), (1, 4), (7, 3)])
    def test_one_rank_exchanges_nothing(
        self, collectives: Collectives, shape: tuple[int, int]
    ) -> None:
        x = torch.randn(shape)
        kept = x.clone()
        for made in (
            collectives.all_reduce(x, "tp"),
            collectives.all_gather(x, "tp"),
            collectives.all_gather(x, "tp", 1),
            collectives.reduce_scatter(x, "tp"),
            collectives.all_to_all(x, "tp"),
            collectives.all_to_all_rows(x, [shape[0]], [shape[0]], "tp"),
        ):
            assert torch.equal(made, kept)

    def test_rank_0s_bytes_arrive(self, collectives: Collectives) -> None:
        assert (
            collectives.broadcast_bytes(b"\x00frame") == b"\x00frame"
            and collectives.broadcast_bytes(b"") == b""
        )

    def test_one_rank_gathers_its_own(self, collectives: Collectives) -> None:
        assert collectives.all_gather_bytes(b"alone") == [b"alone"]
        assert collectives.all_gather_numbers(np.array([4, -2], np.int64)).tolist() == [[4, -2]]

    def test_it_closes_twice(self, collectives: Collectives) -> None:
        collectives.close()
        collectives.close()


class RankedCollectivesSuite:
    """Tests that every backend of several ranks must pass. Define ``run``.

    Attributes:
        ranks: number of ranks, a power of two from 2 on.
    """

    ranks = 2

    def run(
        self, body: Callable[[Collectives, int], Any], mesh: Mapping[str, int] | None = None
    ) -> list[Any]:
        """Call ``body(collectives, rank)`` on all ranks at the same time.

        Args:
            body: function to call.
            mesh: mesh of the ranks; None: {"tp": ranks}.

        Returns:
            Results by rank.
        """
        raise NotImplementedError

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return a random tensor for each rank."""
        every = (
            torch.randn(self.ranks, *shape, generator=torch.Generator().manual_seed(sum(shape)))
            * 100
        )
        return list(every.to(dtype).unbind(0))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(1,), (7, 3), (5, 1031), (2, 65537)])
    def test_all_reduce_gives_every_rank_the_same_bits(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        parts = self.parts(shape, dtype)
        made = self.run(lambda held, rank: held.all_reduce(parts[rank].clone(), "tp"))
        assert made[0].dtype == dtype and all(torch.equal(made[0], other) for other in made[1:])
        tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            made[0].double(),
            torch.stack(parts).double().sum(0),
            rtol=tolerance,
            atol=100 * tolerance,
        )

    def test_a_view_is_reduced_too(self) -> None:
        parts = self.parts((6, 8))
        made = self.run(lambda held, rank: held.all_reduce(parts[rank].t()[1:5], "tp"))
        torch.testing.assert_close(made[0], torch.stack(parts).sum(0).t()[1:5])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_all_gather_is_in_rank_order(self, dim: int, dtype: torch.dtype) -> None:
        parts = self.parts((3, 5), dtype)
        made = self.run(lambda held, rank: held.all_gather(parts[rank], "tp", dim))
        assert all(torch.equal(found, torch.cat(parts, dim)) for found in made)

    def test_reduce_scatter_deals_out_the_sum(self) -> None:
        parts = self.parts((self.ranks * 3, 5))
        made = self.run(lambda held, rank: held.reduce_scatter(parts[rank].clone(), "tp"))
        torch.testing.assert_close(torch.cat(made), torch.stack(parts).sum(0))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_all_to_all_transposes(self, dtype: torch.dtype) -> None:
        parts = self.parts((self.ranks, 3, 4), dtype)
        made = self.run(lambda held, rank: held.all_to_all(parts[rank], "tp"))
        for rank, found in enumerate(made):
            assert torch.equal(found, torch.stack([part[rank] for part in parts]))

    def test_all_to_all_rows_takes_any_counts(self) -> None:
        """Rank r sends (r + 2 * i) % 3 rows to rank i, so that some send or receive no rows."""
        counts = [
            [(sender + 2 * to) % 3 for to in range(self.ranks)] for sender in range(self.ranks)
        ]
        counts[-1] = [0] * self.ranks
        parts = [torch.randn(sum(row), 4) for row in counts]

        def body(held: Collectives, rank: int) -> Tensor:
            return held.all_to_all_rows(
                parts[rank], counts[rank], [row[rank] for row in counts], "tp"
            )

        for rank, found in enumerate(self.run(body)):
            sent = [torch.split(part, row)[rank] for part, row in zip(parts, counts, strict=True)]
            assert torch.equal(found, torch.cat(sent))

    def test_no_rows_are_exchanged_like_any(self) -> None:
        def body(held: Collectives, rank: int) -> list[tuple[int, ...]]:
            x = torch.empty(0, 4)
            none = [0] * self.ranks
            made = [
                held.all_reduce(x, "tp"),
                held.all_gather(x, "tp"),
                held.all_gather(x, "tp", -1),
                held.reduce_scatter(x, "tp"),
                held.all_to_all(torch.empty(self.ranks, 0, 4), "tp"),
                held.all_to_all_rows(x, none, none, "tp"),
            ]
            return [tuple(found.shape) for found in made]

        expected = [(0, 4), (0, 4), (0, 4 * self.ranks), (0, 4), (self.ranks, 0, 4), (0, 4)]
        assert self.run(body) == [expected] * self.ranks

    @pytest.mark.parametrize("size", [0, 1, 2040, 2041, 300_001])
    def test_rank_0s_bytes_reach_every_rank(self, size: int) -> None:
        data = bytes(i % 251 for i in range(size))
        assert (
            self.run(lambda held, rank: held.broadcast_bytes(data if rank == 0 else None))
            == [data] * self.ranks
        )

    def test_every_ranks_bytes_and_numbers_arrive(self) -> None:
        def body(held: Collectives, rank: int) -> tuple[list[bytes], list[list[int]]]:
            return held.all_gather_bytes(b"r" * (rank * 1000)), held.all_gather_numbers(
                np.array([rank, -1, 1 << 40], np.int64)
            ).tolist()

        expected = (
            [b"r" * (rank * 1000) for rank in range(self.ranks)],
            [[rank, -1, 1 << 40] for rank in range(self.ranks)],
        )
        assert self.run(body) == [expected] * self.ranks

    def test_an_axis_connects_its_own_ranks_only(self) -> None:
        """With two dp groups, a sum over attn_tp stays within one, a sum over dp crosses them."""
        if self.ranks < 4:
            pytest.skip("needs two groups of two")
        mesh = {"tp": self.ranks, "dp": 2, "ep": self.ranks}
        half = self.ranks // 2

        def body(held: Collectives, rank: int) -> list[float]:
            return [
                float(held.all_reduce(torch.tensor([2.0**rank]), axis))
                for axis in ("attn_tp", "dp", "ep", "moe_tp", "pp")
            ]

        for rank, found in enumerate(self.run(body, mesh)):
            own = [other for other in range(self.ranks) if other // half == rank // half]
            across = [other for other in range(self.ranks) if other % half == rank % half]
            assert found == [
                sum(2.0**r for r in own),
                sum(2.0**r for r in across),
                2.0**self.ranks - 1,
                2.0**rank,
                2.0**rank,
            ]
