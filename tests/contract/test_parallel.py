"""Strategies of one rank and of several; the collectives of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.parallel import CollectivesSuite, ParallelSuite
from glowplug.plugins.collectives.local import LocalOptions
from glowplug.plugins.collectives.local_runtime import Local
from glowplug.plugins.parallel.single import SingleOptions
from glowplug.plugins.parallel.single_runtime import Single
from glowplug.plugins.parallel.tensor import TensorOptions
from glowplug.plugins.parallel.tensor_runtime import TensorParallel


class TestSingle(ParallelSuite):
    def make(self, rank: int) -> Single:
        return Single(SingleOptions(), bare_plan(), Worker(rank=rank))


class TestTwoTensorRanks(ParallelSuite):
    ranks = 2

    def make(self, rank: int) -> TensorParallel:
        plan = replace(bare_plan(), mesh={"tp": self.ranks})
        return TensorParallel(
            TensorOptions(size=self.ranks), plan, Worker(rank=rank, ranks=self.ranks)
        )


class TestFourTensorRanks(TestTwoTensorRanks):
    ranks = 4


class TestOneTensorRank(TestTwoTensorRanks):
    ranks = 1


class TestLocal(CollectivesSuite):
    def make(self) -> Local:
        return Local(LocalOptions(), bare_plan(), Worker())


def test_local_refuses_a_second_rank() -> None:
    with pytest.raises(AssertionError, match="one rank"):
        Local(LocalOptions(), bare_plan(), Worker(rank=0, ranks=2))


class Overlapping(Single):
    """Both ranks claim the first half, which the suite must detect."""

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Any:
        from glowplug.core.protocols import Shard

        return Shard(0, full // 2, full, reduce=True)


def test_the_suite_finds_a_gap() -> None:
    class Broken(ParallelSuite):
        ranks = 2

        def make(self, rank: int) -> Overlapping:
            return Overlapping(SingleOptions(), bare_plan(), Worker(rank=rank))

    with pytest.raises(AssertionError):
        Broken().test_ranks_hold_everything_once_or_all_of_it("column", 64, 1)
