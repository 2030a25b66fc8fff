"""Plans of ranks that compute the same tokens have one rank's steps; those of others have not."""

from __future__ import annotations

from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.plugins.collectives.peer_sizes import buffer_bytes, peer_sizes

H200 = read_sheet("8xh200")
TP = {"use": "tensor", "size": 4}
DP = {"use": "dp_attention", "size": 2}
EP = {"use": "ep_moe", "size": 4}


@pytest.fixture
def plan_of(planned: Any) -> Any:
    def plan(*parallel: dict[str, Any], **more: Any) -> Any:
        return planned({"dtype": "bfloat16", "parallel": list(parallel), **more}, hardware=H200)

    return plan


def lines(plan: Any) -> dict[str, int]:
    """Return the bytes of each line of the budget."""
    return {line.name: line.bytes for line in plan.budget}


def test_tensor_ranks_capture_and_end_steps_as_one_rank_does(plan_of: Any) -> None:
    alone, ranks = plan_of(), plan_of(TP)
    assert ranks.choice("graphs").name == alone.choice("graphs").name == "cuda_graph"
    assert ranks.sizes.pass_tokens == alone.sizes.pass_tokens != ()
    assert ranks.sampled_last_layer and alone.sampled_last_layer
    assert ranks.expandable_segments and alone.expandable_segments


@pytest.mark.parametrize("strategy", [DP, EP], ids=["dp", "ep"])
def test_ranks_that_exchange_tokens_capture_decode_steps_only(
    strategy: dict[str, Any], plan_of: Any
) -> None:
    plan = plan_of(TP, strategy)
    assert plan.choice("graphs").name == "cuda_graph"
    assert plan.sizes.pass_tokens == () and plan.sizes.short_rows == ()
    assert not plan.sampled_last_layer


def test_exchange_buffers_are_part_of_the_budget(plan_of: Any) -> None:
    plan = plan_of(TP)
    hidden, tokens = plan.facts.model.hidden_size, plan.sizes.max_step_tokens
    assert lines(plan)["exchange buffers"] == peer_sizes(4, hidden, tokens).bytes(4) > 0
    assert "exchange buffers" not in lines(plan_of(TP, collectives={"use": "nccl"}))
    assert "exchange buffers" not in lines(plan_of())


def test_every_group_of_ranks_has_buffers_of_its_own() -> None:
    """Axes that connect the same ranks share theirs."""
    whole = buffer_bytes({"tp": 8}, 7168, 8192)
    assert buffer_bytes({"tp": 8, "ep": 8}, 7168, 8192) == whole
    groups = buffer_bytes({"tp": 8, "dp": 2}, 7168, 8192)
    assert groups == whole + sum(peer_sizes(n, 7168, 8192).bytes(n) for n in (2, 4))
    assert buffer_bytes({"tp": 1}, 7168, 8192) == 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_buffers_hold_what_their_kind_sends(ranks: int) -> None:
    sizes = peer_sizes(ranks, 7168, 8192)
    assert all(size.capacity % size.tile == 0 for size in sizes)
    assert sizes.norm.tile >= 7168 and sizes.norm.capacity >= sizes.norm.tile
    assert (sizes.terms.capacity > 0) == (ranks > 2) and sizes.terms.capacity == sizes.sums.capacity
    assert sizes.bytes(ranks) < 1 << 28


def test_several_hosts_exchange_over_nccl(planned: Any) -> None:
    config = {"dtype": "bfloat16", "parallel": [{"use": "tensor", "size": 4}]}
    config |= {"executor": {"hosts": 2}}
    plan = planned(config, hardware=read_sheet("2x8xh200"))
    assert plan.hosts == 2 and plan.choice("collectives").name == "nccl"
