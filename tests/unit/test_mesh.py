"""Positions of ranks on the mesh, and several parallel strategies combined into one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from glowplug.core.facts.mesh import coordinates
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Shard
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.startup.components import make_worker
from glowplug.core.step.batch import StepShape, idle_batch
from glowplug.core.testing.harness.plans import bare_plan


@pytest.mark.parametrize(
    ("mesh", "rank", "expected"),
    [
        ({}, 0, {}),
        ({"tp": 8}, 5, {"tp": 5, "pp": 0, "dp": 0, "attn_tp": 5, "ep": 0, "moe_tp": 5}),
        ({"tp": 4, "pp": 2}, 6, {"tp": 2, "pp": 1, "dp": 0, "attn_tp": 2, "ep": 0, "moe_tp": 2}),
        ({"tp": 8, "dp": 4}, 5, {"tp": 5, "pp": 0, "dp": 2, "attn_tp": 1, "ep": 0, "moe_tp": 5}),
        (
            {"tp": 8, "dp": 8, "ep": 8},
            3,
            {"tp": 3, "pp": 0, "dp": 3, "attn_tp": 0, "ep": 3, "moe_tp": 0},
        ),
        (
            {"tp": 4, "pp": 2, "ep": 2},
            7,
            {"tp": 3, "pp": 1, "dp": 0, "attn_tp": 3, "ep": 1, "moe_tp": 1},
        ),
    ],
)
def test_coordinates_of_ranks(mesh: dict[str, int], rank: int, expected: dict[str, int]) -> None:
    assert coordinates(rank, mesh) == expected


def test_an_axis_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="axis dp of 3 does not divide the 8 tp ranks"):
        coordinates(0, {"tp": 8, "dp": 3})


def test_a_worker_has_its_place_and_its_device() -> None:
    plan = replace(bare_plan(), mesh={"tp": 16}, device="cuda")
    worker = make_worker(replace(plan, hosts=2), 11, "file:///somewhere")
    assert (worker.rank, worker.ranks, worker.device, worker.coordinates["tp"]) == (
        11,
        16,
        "cuda:3",
        11,
    )
    assert worker.rendezvous == "file:///somewhere"
    assert make_worker(plan, 11).device == "cuda:11" and make_worker(bare_plan(), 0).device == "cpu"
    several = replace(plan.facts, hardware=replace(plan.facts.hardware, hosts=2))
    assert make_worker(replace(plan, facts=several), 11).device == "cuda:11", "one host is used"


class Strategy:
    """A strategy that decides the roles in ``shards`` and marks tensors with its letter's
    number.
    """

    def __init__(self, mark: int, shards: dict[str, Shard], exchange: object = None) -> None:
        self.mark, self.shards, self.exchange = mark, shards, exchange

    def router(self) -> Any:
        return None

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard | None:
        return self.shards.get(role)

    def agree(self, local: StepShape) -> StepShape:
        return replace(local, rows=local.rows * 10 + self.mark)

    def enter_attention(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        return x * 10 + self.mark

    leave_attention = enter_attention

    def expert_exchange(self, name: str, experts: int) -> Any:
        return self.exchange


def test_a_later_strategy_refines_the_ones_before() -> None:
    split, whole = Shard(8, 8, 16, reduce=True), Shard(0, 16, 16)
    mine = object()
    stack = ParallelStack(
        [Strategy(1, {"heads": split, "row": split}, mine), Strategy(2, {"heads": whole})]
    )  # type: ignore[list-item]
    assert stack.shard("heads", "a", 16) is whole and stack.shard("row", "a", 16) is split
    assert stack.shard("vocab", "a", 48) == Shard(0, 48, 48)
    assert stack.shard("heads_row", "a", 16) is split, "the general role decides"
    assert stack.router() is None and stack.expert_exchange("a", 4) is mine
    assert stack.agree(StepShape(Mode.DECODE, 0, 0)).rows == 12
    zero = torch.zeros(())
    assert (
        stack.leave_attention(zero, idle_batch()) == 12
        and stack.enter_attention(zero, idle_batch()) == 21
    )
    assert ParallelStack([]).expert_exchange("a", 4) is None
