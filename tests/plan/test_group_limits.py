"""Limits of an engine with dp groups: the operator states them for the whole engine, each group has
a share, and the memory of a step does not grow with the number of groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.mesh import group_share
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.plan import Decision, EnginePlan
from glowplug.core.plan.table import render
from glowplug.core.plugin.byte_costs import ExchangeSizes
from glowplug.entrypoints.server.operations import whole_engine
from glowplug.plugins.collectives.peer_memory import PeerMemoryOptions
from glowplug.plugins.collectives.peer_sizes import buffer_bytes
from tests.support.source_tree import ROOT

V3 = str(ROOT / "models" / "shapes" / "deepseek-v3.json")
GIB = 1 << 30
S0_TOKENS = 3200  #: longest sequence of S0's rows
S0_REQUESTS = 768  #: concurrent requests of S0's largest rows


def groups(tp: int, dp: int, ep: int = 0, **more: Any) -> dict[str, Any]:
    """Return a configuration of ``tp`` ranks in ``dp`` groups."""
    parallel: list[dict[str, Any]] = [{"use": "tensor", "size": tp}]
    if ep:
        parallel.append({"use": "ep_moe", "size": ep})
    if dp:
        parallel.append({"use": "dp_attention", "size": dp})
    return {"parallel": parallel, "executor": {"oversubscribe": True}, **more}


def decision(plan: EnginePlan, field: str) -> Decision:
    (found,) = [each for each in plan.decisions if each.field == field]
    return found


def lines(plan: EnginePlan) -> dict[str, int]:
    return {line.name: line.bytes for line in plan.budget}


# ---- shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "share", "why"),
    [
        (64, 16, "64 requests over 4 groups: 16 a group"),
        (10, 3, "10 requests over 4 groups: 3 a group, rounded up to 12 in all"),
        (2, 1, "2 requests over 4 groups: 1 a group, rounded up to 4 in all"),
        (1, 1, "1 request over 4 groups: 1 a group, rounded up to 4 in all"),
    ],
)
def test_given_limits_mean_the_whole_engine(planned: Any, limit: int, share: int, why: str) -> None:
    scheduler = {"max_running_requests": limit, "max_queued_requests": limit, "chunk_size": limit}
    plan = planned(groups(4, 4, scheduler=scheduler))
    sizes = plan.sizes
    assert (sizes.groups, sizes.max_running, sizes.max_queued, sizes.chunk_size) == (
        4,
        share,
        share,
        share,
    )
    assert sizes.max_step_tokens == 2 * share and sizes.max_admitted == 4 * 2 * share
    for field in ("max_running_requests", "max_queued_requests"):
        found = decision(plan, f"scheduler.{field}")
        assert (found.value, found.by, found.notable) == (limit, "operator", True)
        assert found.why.endswith(why)
    chunk = decision(plan, "scheduler.chunk_size")
    assert chunk.value == limit and chunk.why.endswith(why.replace("request", "token"))


def test_the_brief_plan_states_both_numbers(planned: Any) -> None:
    plan = planned(groups(4, 2, scheduler={"max_running_requests": 64}))
    shown = " ".join(render(plan, brief=True).split())
    assert "64 requests over 2 groups: 32 a group" in shown
    assert "1024 tokens over 2 groups: 512 a group" in shown


def test_default_rows_are_those_of_each_group_and_the_default_chunk_is_shared(
    planned: Any,
) -> None:
    alone = planned(groups(4, 0)).sizes
    four = planned(groups(4, 4))
    assert four.sizes.max_running == alone.max_running
    assert four.sizes.chunk_size == alone.chunk_size // 4
    assert decision(four, "scheduler.max_running_requests").value == 4 * alone.max_running
    assert decision(four, "scheduler.chunk_size").value == alone.chunk_size


def test_one_group_keeps_the_limits_and_adds_no_remark(planned: Any) -> None:
    plan = planned(groups(4, 1, scheduler={"max_running_requests": 10}))
    assert plan.sizes.groups == 1 and plan.sizes.max_running == 10
    assert "group" not in decision(plan, "scheduler.max_running_requests").why


def test_server_info_reports_the_limits_of_the_whole_engine(planned: Any) -> None:
    scheduler = {"max_running_requests": 64, "max_queued_requests": 8, "chunk_size": 256}
    sizes = planned(groups(4, 4, scheduler=scheduler)).sizes
    whole = whole_engine(sizes)
    assert (whole.max_running, whole.max_queued, whole.chunk_size) == (64, 8, 256)
    assert whole.max_step_tokens == 4 * sizes.max_step_tokens
    assert whole.num_pages == sizes.num_pages


# ---- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graphs", "captured", "why"),
    [
        (
            {"batch_sizes": [8, 64, 256]},
            [1, 8, 32],
            "of all 8 groups: 8, 64, 256",
        ),
        ({"batch_sizes": [5, 60, 800]}, [1, 8], "without 800: at most 64 sequences of a group run"),
        ({"max_batch": 64}, [1, 2, 3, 4, 6, 8], "up to 8 of 64 sequences of a group"),
    ],
)
def test_given_batch_sizes_of_graphs_count_the_sequences_of_all_groups(
    planned: Any, graphs: dict[str, Any], captured: list[int], why: str
) -> None:
    plan = planned(
        groups(
            8,
            8,
            model=V3,
            graphs={"use": "cuda_graph", **graphs},
            scheduler={"max_running_requests": 512},
        ),
        hardware=read_sheet("8xh200"),
    )
    found = decision(plan, "graphs.batch_sizes")
    assert found.value == captured and why in found.why
    runner = plan.choice("graphs")
    assert {name: list(value) if isinstance(value, tuple) else value
            for name, value in runner.options.items() if name in graphs} == graphs  # fmt: skip


# ---- memory --------------------------------------------------------------------------------------


def s0_hardware(card_gib: int) -> HardwareFacts:
    """Return two hosts of eight GPUs with ``card_gib`` GiB each."""
    sheet = read_sheet("2x8xh200")
    cards = tuple(replace(card, memory=card_gib * GIB) for card in sheet.devices)
    return replace(sheet, devices=cards)


@pytest.mark.parametrize("card_gib", [96, 140])
@pytest.mark.parametrize("speculative", [{"use": "none"}, {"use": "nextn", "steps": 1}])
@pytest.mark.parametrize("ep", [0, 16])
def test_s0_with_768_requests_over_16_groups_fits(
    planned: Any, ep: int, speculative: dict[str, Any], card_gib: int
) -> None:
    """The rows of S0 that ran out of memory: R1 on 2 x 8 GPUs, with and without expert parallelism
    and drafts.

    S0's GPUs have 96 GB. Every group holds 48 sequences of the longest length at once.
    """
    plan = planned(
        groups(
            16,
            16,
            ep,
            model=V3,
            context_length=S0_TOKENS,
            scheduler={"max_running_requests": S0_REQUESTS},
            graphs={"use": "cuda_graph"},
            speculative=speculative,
        ),
        hardware=s0_hardware(card_gib),
    )
    sizes = plan.sizes
    assert sizes.groups * sizes.max_running == S0_REQUESTS
    assert (sizes.num_pages - 1) * sizes.page_size >= sizes.max_running * sizes.positions
    assert lines(plan)["activations"] < 2 * GIB
    assert decision(plan, "graphs.batch_sizes").value[-1] == sizes.max_running
    assert sum(lines(plan).values()) <= card_gib * GIB


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_the_tokens_of_a_padded_step_stay_within_the_engines_limits(planned: Any, dp: int) -> None:
    """Padded tokens are at most the chunk and the running sequences, rounded up per group."""
    config = {"model": V3, "scheduler": {"max_running_requests": 512, "chunk_size": 4096}}
    hardware = read_sheet("8xh200")
    alone = planned(groups(8, 0, **config), hardware=hardware).sizes
    sizes = planned(groups(8, dp, **config), hardware=hardware).sizes
    assert sizes.groups * sizes.max_step_tokens == alone.max_step_tokens == 4096 + 512


def test_activations_do_not_grow_with_the_number_of_groups(planned: Any) -> None:
    config = {"model": V3, "scheduler": {"max_running_requests": 512, "chunk_size": 4096}}
    hardware = read_sheet("8xh200")
    few, many = (lines(planned(groups(8, dp, 8, **config), hardware=hardware)) for dp in (2, 8))
    assert many["activations"] <= 1.25 * few["activations"]
    assert many["logits"] <= 1.25 * few["logits"]


def test_exchange_buffers_count_the_tokens_of_all_groups(planned: Any) -> None:
    """Feed-forward layers sum the tokens of all groups over all ranks."""
    scheduler = {"max_running_requests": 8, "chunk_size": 64}
    plan = planned(groups(8, 4, model=V3, scheduler=scheduler), hardware=read_sheet("8xh200"))
    hidden = plan.facts.model.hidden_size
    sizes = ExchangeSizes(PeerMemoryOptions(), plan.mesh, hidden, 8, 64 + 8)
    assert lines(plan)["exchange buffers"] == buffer_bytes(sizes)


def test_shares_are_rounded_up() -> None:
    assert [group_share(count, {"tp": 4, "dp": 4}) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert group_share(7, {}) == 7
