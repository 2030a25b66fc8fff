"""Faults planted in parallel strategies and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from glowplug.core.facts.mesh import coordinates
from glowplug.core.protocols import Collectives, Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.threads import ThreadOptions
from glowplug.core.testing.harness.threads_runtime import MEETINGS, Meeting, ThreadCollectives
from glowplug.core.testing.suites.parallel import (
    CollectivesSuite,
    ParallelSuite,
    RankedCollectivesSuite,
)
from glowplug.plugins.collectives.local import LocalOptions
from glowplug.plugins.collectives.local_runtime import Local
from glowplug.plugins.parallel.single import SingleOptions
from glowplug.plugins.parallel.single_runtime import Single
from glowplug.plugins.parallel.tensor import TensorOptions
from glowplug.plugins.parallel.tensor_runtime import TensorParallel
from tests.mutants.framework import Mutant, Planter

# ---- collectives ---------------------------------------------------------------------------------


class OneRank(CollectivesSuite):
    def make(self) -> Any:
        return Local(LocalOptions(), bare_plan(), Worker())


class TwoRanks(RankedCollectivesSuite):
    """Ranks are threads over shared lists."""

    def open(self, rank: int, mesh: dict[str, int]) -> Any:
        worker = Worker(
            rank=rank,
            ranks=self.ranks,
            coordinates=coordinates(rank, mesh),
            rendezvous="mutants",
        )
        return ThreadCollectives(ThreadOptions(), replace(bare_plan(), mesh=mesh), worker)

    def run(
        self, body: Callable[[Collectives, int], Any], mesh: Mapping[str, int] | None = None
    ) -> list[Any]:
        over = dict(mesh or {"tp": self.ranks})
        MEETINGS["mutants"] = Meeting()
        held = [self.open(rank, over) for rank in range(self.ranks)]
        with ThreadPoolExecutor(self.ranks) as pool:
            work = [pool.submit(body, one, rank) for rank, one in enumerate(held)]
            found = [one.exception() for one in work]
            failures = [error for error in found if error is not None]
            if failures:
                raise failures[0]
            return [one.result() for one in work]


class FourRanks(TwoRanks):
    ranks = 4


alone = Planter("collectives", OneRank)
ranked = Planter("collectives", TwoRanks, "open")
four = Planter("collectives", FourRanks, "open")


def _closing(close: Any) -> None:
    raise RuntimeError("closed already")


def _in_place_view(reduce: Any, x: Any, axis: str) -> Any:
    return reduce(x if x.is_contiguous() else x.contiguous() * 0, axis)


COLLECTIVES: list[Mutant] = [
    alone.swap(
        "one rank's sum is doubled",
        "test_one_rank_exchanges_nothing",
        "all_reduce",
        lambda f, x, axis: f(x, axis) * 2,
    ),
    alone.swap(
        "one rank gathers twice",
        "test_one_rank_exchanges_nothing",
        "all_gather",
        lambda f, x, axis, dim=0: torch.cat([f(x, axis, dim)] * 2),
    ),
    alone.swap(
        "bytes end at a zero",
        "test_rank_0s_bytes_arrive",
        "broadcast_bytes",
        lambda f, data: f(data).split(b"\0")[0],
    ),
    alone.swap(
        "numbers lose their sign",
        "test_one_rank_gathers_its_own",
        "all_gather_numbers",
        lambda f, values: abs(f(values)),
    ),
    alone.swap("the second close raises", "test_it_closes_twice", "close", _closing),
    ranked.swap(
        "a sum over ranks is a mean",
        "test_all_reduce_gives_every_rank_the_same_bits",
        "all_reduce",
        lambda f, x, axis: (f(x, axis).double() / 2).to(x.dtype),
    ),
    ranked.swap(
        "sums are float32",
        "test_all_reduce_gives_every_rank_the_same_bits",
        "all_reduce",
        lambda f, x, axis: f(x.float(), axis),
    ),
    ranked.swap("views are not summed", "test_a_view_is_reduced_too", "all_reduce", _in_place_view),
    ranked.swap(
        "parts are gathered backwards",
        "test_all_gather_is_in_rank_order",
        "all_gather",
        lambda f, x, axis, dim=0: torch.cat(f(x, axis, dim).chunk(2, dim)[::-1], dim),
    ),
    ranked.swap(
        "the dimension is ignored",
        "test_all_gather_is_in_rank_order",
        "all_gather",
        lambda f, x, axis, dim=0: f(x, axis, 0),
    ),
    ranked.swap(
        "ranks get the other's sum",
        "test_reduce_scatter_deals_out_the_sum",
        "reduce_scatter",
        lambda f, x, axis: f(torch.cat(x.chunk(2)[::-1]), axis),
    ),
    ranked.swap(
        "parts are sent to the wrong rank",
        "test_all_to_all_transposes",
        "all_to_all",
        lambda f, x, axis: f(x.flip(0), axis),
    ),
    ranked.swap(
        "rows are dropped",
        "test_all_to_all_rows_takes_any_counts",
        "all_to_all_rows",
        lambda f, x, counts, received, axis: f(x, counts, received, axis)[:-1],
    ),
    ranked.swap(
        "empty tensors are not exchanged",
        "test_no_rows_are_exchanged_like_any",
        "all_gather",
        lambda f, x, axis, dim=0: f(x, axis, dim) if x.numel() else x,
    ),
    ranked.swap(
        "large frames are cut",
        "test_rank_0s_bytes_reach_every_rank",
        "broadcast_bytes",
        lambda f, data: f(data)[:4096],
    ),
    ranked.swap(
        "numbers are 32 bits wide",
        "test_every_ranks_bytes_and_numbers_arrive",
        "all_gather_numbers",
        lambda f, values: f(values).astype(np.int32).astype(np.int64),
    ),
    four.swap(
        "an axis connects all ranks",
        "test_an_axis_connects_its_own_ranks_only",
        "all_reduce",
        lambda f, x, axis: f(x, "tp"),
    ),
]

# ---- strategies ----------------------------------------------------------------------------------


class Tensor(ParallelSuite):
    ranks = 2

    def make(self, rank: int) -> Any:
        plan = replace(bare_plan(), mesh={"tp": self.ranks})
        worker = Worker(rank=rank, ranks=self.ranks)
        return TensorParallel(TensorOptions(size=self.ranks), plan, worker)


class Alone(ParallelSuite):
    def make(self, rank: int) -> Any:
        return Single(SingleOptions(), bare_plan(), Worker(rank=rank))


tensor = Planter("parallel", Tensor)
single = Planter("parallel", Alone)
HELD = "test_ranks_hold_everything_once_or_all_of_it"


def sharded(fault: str, by: str, change: Callable[[Any], Any]) -> Mutant:
    """Return the mutant with other shards of split dimensions."""

    def shard(correct: Any, role: str, name: str, full: int, block: int = 1) -> Any:
        found = correct(role, name, full, block)
        return change(found) if found is not None and found.size < full else found

    return tensor.swap(fault, by, "shard", shard)


PARALLEL: list[Mutant] = [
    sharded("all ranks hold the first part", HELD, lambda found: replace(found, start=0)),
    sharded("parts overlap", HELD, lambda found: replace(found, size=found.size + 1)),
    sharded("the last element is missing", HELD, lambda found: replace(found, size=found.size - 1)),
    sharded(
        "the whole dimension is forgotten", HELD, lambda found: replace(found, full=found.size)
    ),
    tensor.swap(
        "blocks are cut",
        HELD,
        "shard",
        lambda f, role, name, full, block=1: (
            replace(f(role, name, full, 1), start=f(role, name, full, 1).start + 1)
            if block > 1 and f(role, name, full, 1)
            else f(role, name, full, block)
        ),
    ),
    tensor.swap(
        "replicated tensors are split",
        "test_what_is_replicated_stays_whole",
        "shard",
        lambda f, role, name, full, block=1: f(
            "column" if role == "replicated" else role, name, full, block
        ),
    ),
    tensor.change(
        "experts are listed twice",
        "test_listed_experts_are_all_held",
        lambda made: setattr(made, "held_experts", lambda name, experts: [0] * (experts // 2)),
    ),
    single.swap(
        "one rank agrees on another step",
        "test_one_rank_agrees_with_itself",
        "agree",
        lambda f, shape: replace(f(shape), rows=shape.rows + 1),
    ),
    single.swap(
        "one rank drops tokens",
        "test_one_rank_keeps_its_tokens",
        "leave_attention",
        lambda f, x, batch: f(x, batch)[:-1],
    ),
    single.swap(
        "tokens are reordered",
        "test_one_rank_keeps_its_tokens",
        "enter_attention",
        lambda f, x, batch: f(x, batch).flip(0),
    ),
    single.swap(
        "a new router in each call",
        "test_it_deals_requests_the_same_each_call",
        "router",
        lambda f: object(),
    ),
]
MUTANTS = [*COLLECTIVES, *PARALLEL]
