"""Plans of ranks that compute the same tokens have one rank's steps; those of others have not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plugin.byte_costs import ExchangeSizes
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from glowplug.kernels.collectives.buffer_sizes import WORD_BYTES, buffer_words
from glowplug.plugins.collectives.peer_experts import expert_buffer_size
from glowplug.plugins.collectives.peer_memory import PeerMemoryOptions
from glowplug.plugins.collectives.peer_sizes import buffer_bytes, library_bytes, peer_sizes
from glowplug.plugins.collectives.torch_distributed import NCCL_GROUP_BYTES
from glowplug.plugins.parallel.ep_moe import pushed_rows

H200 = read_sheet("8xh200")
TP = {"use": "tensor", "size": 4}
DP = {"use": "dp_attention", "size": 2}
EP = {"use": "ep_moe", "size": 4}


@pytest.fixture
def plan_of(planned: Any) -> Any:
    def plan(*parallel: dict[str, Any], **more: Any) -> Any:
        return planned({"dtype": "bfloat16", "parallel": list(parallel), **more}, hardware=H200)

    return plan


def sizes(mesh: dict[str, int]) -> ExchangeSizes:
    """Return exchanges of DeepSeek-V3's hidden size on a card without a table."""
    return ExchangeSizes(PeerMemoryOptions(), mesh, 7168, 8, 8192)


def lines(plan: Any) -> dict[str, int]:
    """Return the bytes of each line of the budget."""
    return {line.name: line.bytes for line in plan.budget}


@pytest.mark.parametrize(
    "more", [(), (EP,), (EP | {"exchange": "push"},)], ids=["tp", "ep", "ep push"]
)
def test_ranks_with_all_tokens_capture_and_end_steps_as_one_rank_does(
    more: tuple[dict[str, Any], ...], plan_of: Any
) -> None:
    alone, ranks = plan_of(), plan_of(TP, *more)
    assert ranks.choice("graphs").name == alone.choice("graphs").name == "cuda_graph"
    counts = alone.sizes.pass_tokens
    assert counts != () and ranks.sizes.pass_tokens[: len(counts)] == counts
    assert ranks.sampled_last_layer and alone.sampled_last_layer
    assert ranks.expandable_segments and alone.expandable_segments


@pytest.mark.parametrize(
    "strategy", [DP, EP | {"exchange": "all_to_all_static"}], ids=["dp", "ep all-to-all"]
)
def test_ranks_that_exchange_tokens_capture_passes_but_no_part_of_their_own_tokens(
    strategy: dict[str, Any], plan_of: Any
) -> None:
    plan = plan_of(TP, strategy)
    assert plan.choice("graphs").name == "cuda_graph"
    assert plan.sizes.pass_tokens[-1] == plan.sizes.max_step_tokens
    assert plan.sizes.short_rows == () and not plan.sampled_last_layer


def test_ranks_that_exchange_tokens_run_the_drafts_pass_over_prompts_eagerly(
    plan_of: Any, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, TINY_V3 | {"num_nextn_predict_layers": 1})
    drafts = {"model": str(folder), "speculative": {"use": "nextn"}}
    assert plan_of(TP, **drafts).sizes.extend_tokens != ()
    assert plan_of(TP, EP, **drafts).sizes.extend_tokens != ()
    plan = plan_of(TP, DP, **drafts)
    assert plan.sizes.extend_tokens == () != plan.sizes.pass_tokens


def test_a_slice_of_the_logits_is_kept_beside_the_gathered_ones(plan_of: Any) -> None:
    alone, ranks = plan_of(), plan_of(TP)
    model = ranks.facts.model
    assert model.vocab_size % TP["size"] == 0
    rows = ranks.sizes.max_running
    slice_bytes = rows * model.vocab_size // TP["size"] * 4
    assert lines(ranks)["logits"] == lines(alone)["logits"] + slice_bytes


def test_exchange_buffers_are_part_of_the_budget(plan_of: Any) -> None:
    plan = plan_of(TP)
    hidden, tokens = plan.facts.model.hidden_size, plan.sizes.max_step_tokens
    assert lines(plan)["exchange buffers"] == peer_sizes(4, hidden, tokens).bytes(4) > 0
    assert "exchange buffers" not in lines(plan_of(TP, collectives={"use": "nccl"}))
    assert "exchange buffers" not in lines(plan_of())


def test_buffers_of_nccl_are_an_estimate_in_the_budget(plan_of: Any) -> None:
    """They are part of plans in which NCCL exchanges some tensors, once for each group of ranks."""
    assert lines(plan_of(TP, collectives={"use": "nccl"}))["exchange library"] == NCCL_GROUP_BYTES
    plan = plan_of(TP, DP | {"size": 2}, collectives={"use": "nccl"})
    assert lines(plan)["exchange library"] == 3 * NCCL_GROUP_BYTES
    (line,) = [line for line in plan.budget if line.name == "exchange library"]
    assert "estimate" in line.how
    assert lines(plan_of(TP, DP))["exchange library"] == NCCL_GROUP_BYTES, "that of all four ranks"
    assert "exchange library" not in lines(plan_of())
    assert library_bytes(sizes({"tp": 8, "ep": 8})) == NCCL_GROUP_BYTES
    assert library_bytes(sizes({"tp": 8, "dp": 2})) == 2 * NCCL_GROUP_BYTES
    assert library_bytes(sizes({"tp": 2})) == 0, "two ranks send large tensors in pieces"


def test_every_group_of_ranks_has_buffers_of_its_own() -> None:
    """Axes that connect the same ranks share theirs."""
    whole = buffer_bytes(sizes({"tp": 8}))
    assert buffer_bytes(sizes({"tp": 8, "ep": 8})) == whole
    groups = buffer_bytes(sizes({"tp": 8, "dp": 2}))
    assert groups == whole + sum(peer_sizes(n, 7168, 8192).bytes(n) for n in (2, 4))
    assert buffer_bytes(sizes({"tp": 1})) == 0


def test_pushed_tokens_have_buffers_in_the_budget(plan_of: Any) -> None:
    plain, pushed = plan_of(TP, EP, DP), plan_of(TP, EP | {"exchange": "push"}, DP)
    model = pushed.facts.model
    rows = pushed_rows(pushed.mesh, pushed.sizes.max_step_tokens)
    size = expert_buffer_size(model.hidden_size, model.sizes.experts_per_token, rows, 2)
    assert size.capacity == rows * size.tile
    added = lines(pushed)["exchange buffers"] - lines(plain)["exchange buffers"]
    assert added == 2 * buffer_words(4, size.capacity) * WORD_BYTES > 0


def test_the_plan_states_how_tokens_reach_their_experts(plan_of: Any) -> None:
    def stated(*parallel: Any) -> list[tuple[str, str]]:
        decisions = plan_of(*parallel).decisions
        return [(one.value, one.by) for one in decisions if one.field == "parallel.1.exchange"]

    assert stated(TP, EP, DP) == [("all_gather", "auto")]
    assert stated(TP, EP) == [], "tokens stay where they are"
    assert stated(TP, EP | {"exchange": "push"}, DP) == [("push", "operator")]


def test_pushed_tokens_take_no_more_memory_in_float32() -> None:
    wide, narrow = (expert_buffer_size(7168, 8, 256, element) for element in (4, 2))
    assert narrow.capacity - wide.tile < wide.capacity <= narrow.capacity
    assert wide.capacity % wide.tile == 0


def test_nothing_is_pushed_where_every_rank_has_all_tokens(plan_of: Any) -> None:
    whole, pushed = plan_of(TP, EP), plan_of(TP, EP | {"exchange": "push"})
    assert lines(pushed)["exchange buffers"] == lines(whole)["exchange buffers"]


@pytest.mark.parametrize("name", ["nccl", "gloo"])
def test_tokens_are_pushed_through_peers_memory_only(name: str, plan_of: Any) -> None:
    parallel = (TP, EP | {"exchange": "push"}, DP)
    with pytest.raises(PlanRefused) as refused:
        plan_of(*parallel, collectives={"use": name})
    (refusal,) = [one for one in refused.value.refusals if one.field == "parallel.1.exchange"]
    assert name in refusal.reason
    assert refusal.fix == 'parallel.1.exchange = "all_gather"'
    plan_of(TP, EP | {"exchange": "all_gather"}, DP)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_buffers_hold_what_their_kind_sends(ranks: int) -> None:
    sizes = peer_sizes(ranks, 7168, 8192)
    assert all(size.capacity % size.tile == 0 for size in sizes)
    assert sizes.norm.tile >= 7168 and sizes.norm.capacity >= sizes.norm.tile
    assert (sizes.terms.capacity > 0) == (ranks > 2) and sizes.terms.capacity == sizes.sums.capacity
    assert sizes.bytes(ranks) < 1 << 28


@pytest.mark.parametrize(
    ("hidden", "tokens", "rows"),
    [(2048, 8192, 128), (2048, 100, 100), (4096, 8192, 128), (5120, 8192, 64), (7168, 8192, 64)],
)
def test_fused_norms_take_as_many_rows_as_fit_on_the_gpu(
    hidden: int, tokens: int, rows: int
) -> None:
    norm = peer_sizes(2, hidden, tokens).norm
    assert norm.capacity == rows * norm.tile


def test_several_hosts_exchange_over_nccl(planned: Any) -> None:
    config = {"dtype": "bfloat16", "parallel": [{"use": "tensor", "size": 4}]}
    config |= {"executor": {"hosts": 2}}
    plan = planned(config, hardware=read_sheet("2x8xh200"))
    assert plan.hosts == 2 and plan.choice("collectives").name == "nccl"
