"""The steps that the plan captures: chosen automatically, clipped, or refused with the reason."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.budget.graphs import PER_PIECE
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, Capture, Mode
from tests.support.tiny import write_config

H200 = read_sheet("1xh200")


def decided(plan: Any) -> dict[str, tuple[Any, str, str]]:
    return {
        decision.field: (decision.value, decision.by, decision.why) for decision in plan.decisions
    }


def test_a_device_captures_by_default(planned: Any) -> None:
    plan = planned({"dtype": "bfloat16"}, hardware=H200)
    assert plan.choice("graphs").name == "cuda_graph"
    sizes, by, why = decided(plan)["graphs.batch_sizes"]
    assert sizes[0] == 1 and sizes[-1] == plan.sizes.max_running == 256 and by == "size"
    assert "256 of 256 sequences" in why
    line = next(line for line in plan.budget if line.name == "graphs")
    assert line.bytes > 0 and str(len(sizes)) in line.how
    eager = planned({"dtype": "bfloat16", "graphs": {"use": "eager"}}, hardware=H200)
    assert "graphs" not in {
        line.name for line in eager.budget
    } and "graphs.batch_sizes" not in decided(eager)


@pytest.mark.parametrize(
    ("graphs", "want", "by", "why"),
    [
        (
            {"batch_sizes": [1, 8, 300]},
            [1, 8],
            "operator",
            "given; without 300: at most 16 sequences run",
        ),
        (
            {"batch_sizes": [4, 8], "max_batch": 4},
            [4],
            "operator",
            "given; without 8: graphs.max_batch is lower",
        ),
        ({"max_batch": 2}, [1, 2], "size", "default, up to 2 of 16 sequences"),
    ],
)
def test_sizes_that_cannot_come_are_left_out(
    planned: Any, graphs: dict[str, Any], want: list[int], by: str, why: str
) -> None:
    plan = planned(
        {
            "dtype": "bfloat16",
            "scheduler": {"max_running_requests": 16},
            "graphs": {"use": "cuda_graph", **graphs},
        },
        hardware=H200,
    )
    assert decided(plan)["graphs.batch_sizes"] == (want, by, why)


@pytest.mark.parametrize(
    ("config", "field", "reason", "fix"),
    [
        (
            {"graphs": {"batch_sizes": [8, 9], "max_batch": 4}},
            "graphs.max_batch",
            "exceeds graphs.max_batch = 4",
            "graphs.max_batch = 9",
        ),
        (
            {"graphs": {"batch_sizes": [20]}, "scheduler": {"max_running_requests": 16}},
            "graphs.batch_sizes",
            "exceeds the 16 sequences",
            "graphs.batch_sizes = [16]",
        ),
        (
            {"graphs": {"batch_sizes": [512, 600]}},
            "graphs.batch_sizes",
            "exceeds the 256 sequences that may run by default",
            "scheduler.max_running_requests = 512",
        ),
        (
            {"graphs": {}, "attention": {"use": "torch_mla"}},
            "graphs.use",
            "torch_mla syncs with the host",
            "eager",
        ),
        ({"graphs": {"batch_sizes": []}}, "graphs.batch_sizes", "", ""),
        ({"graphs": {"batch_sizes": [0, 1]}}, "graphs.batch_sizes.0", "", ""),
    ],
)
def test_options_that_leave_nothing_to_capture_are_refused(
    refused: Any, config: dict[str, Any], field: str, reason: str, fix: str
) -> None:
    found = refused(
        {"dtype": "bfloat16", **config, "graphs": {"use": "cuda_graph", **config["graphs"]}},
        hardware=H200,
    )
    assert field in found, found
    assert reason in found[field].reason and fix in found[field].fix


@pytest.mark.parametrize("sizes", [[0], [0, 0], ["big"]])
def test_a_list_of_wrong_sizes_is_refused_once_for_each(refused: Any, sizes: list[Any]) -> None:
    found = refused(
        {"dtype": "bfloat16", "graphs": {"use": "cuda_graph", "batch_sizes": sizes}}, hardware=H200
    )
    assert list(found) == [f"graphs.batch_sizes.{at}" for at in range(len(sizes))]


def test_a_machine_without_a_card_is_the_one_reason(refused: Any, cpu: Any) -> None:
    found = refused({"graphs": {"use": "cuda_graph", "batch_sizes": [1, 2]}}, hardware=cpu)
    assert list(found) == ["graphs.use"]
    assert found["graphs.use"].reason == "cuda_graph runs on cuda, the device is cpu"
    assert found["graphs.use"].fix == 'graphs.use = "eager"'


@pytest.mark.parametrize(
    "followed",
    [
        {"graphs": {"batch_sizes": [256]}},
        {"graphs": {"batch_sizes": [512, 600]}, "scheduler": {"max_running_requests": 512}},
    ],
)
def test_either_way_out_of_a_list_above_the_default_captures(
    planned: Any, followed: dict[str, Any]
) -> None:
    plan = planned(
        {"dtype": "bfloat16", **followed, "graphs": {"use": "cuda_graph", **followed["graphs"]}},
        hardware=H200,
    )
    assert decided(plan)["graphs.batch_sizes"][0] == followed["graphs"]["batch_sizes"][:1]


def test_steps_of_several_ranks_are_captured(planned: Any) -> None:
    plan = planned(
        {"dtype": "bfloat16", "parallel": [{"use": "tensor", "size": 2}]},
        hardware=read_sheet("8xh200"),
    )
    assert plan.choice("graphs").name == "cuda_graph"
    assert plan.sizes.pass_tokens == tuple(decided(plan)["graphs.prefill_tokens"][0])


def test_small_steps_with_prompts_are_captured_too(planned: Any) -> None:
    plan = planned({"dtype": "bfloat16"}, hardware=H200)
    counts, by, why = decided(plan)["graphs.prefill_tokens"]
    assert plan.sizes.pass_tokens == tuple(counts) and counts[0] == 16 and by == "size"
    assert f"up to {counts[-1]} of {plan.sizes.max_step_tokens} tokens per step" in why
    without = planned({"dtype": "bfloat16", "graphs": {"prefill": False}}, hardware=H200)
    assert without.sizes.pass_tokens == () and "graphs.prefill_tokens" not in decided(without)

    def size(plan: Any) -> int:
        return next(line.bytes for line in plan.budget if line.name == "graphs")

    assert size(plan) > size(without)
    eager = planned(
        {"dtype": "bfloat16", "graphs": {"use": "eager", "prefill": False}}, hardware=H200
    )
    assert eager.sizes.pass_tokens == ()


@pytest.mark.parametrize(
    ("graphs", "want", "by", "why"),
    [
        (
            {"prefill_tokens": [64, 8, 5000]},
            [8, 64],
            "operator",
            "without 5000: a step has at most 144 tokens",
        ),
        (
            {"prefill_tokens": [64, 8], "max_prefill_tokens": 32},
            [8],
            "operator",
            "without 64: graphs.max_prefill_tokens is",
        ),
        (
            {"max_prefill_tokens": 40},
            [16, 32, 40],
            "size",
            "default, up to 40 of 144 tokens per step",
        ),
        ({}, [16, 32, 64, 128, 144], "size", "default, up to 144 of 144 tokens per step"),
    ],
)
def test_token_counts(
    planned: Any, graphs: dict[str, Any], want: list[int], by: str, why: str
) -> None:
    plan = planned(
        {
            "dtype": "bfloat16",
            "scheduler": {"max_running_requests": 16, "chunk_size": 128},
            "graphs": {"use": "cuda_graph", **graphs},
        },
        hardware=H200,
    )
    found = decided(plan)["graphs.prefill_tokens"]
    assert found[:2] == (want, by) and why in found[2]


@pytest.mark.parametrize(
    ("graphs", "field", "reason"),
    [
        ({"prefill": False, "prefill_tokens": [8]}, "graphs.prefill", "captures no prefill step"),
        (
            {"prefill_tokens": [64], "max_prefill_tokens": 32},
            "graphs.max_prefill_tokens",
            "exceeds graphs.max_prefill_tokens = 32",
        ),
        ({"prefill_tokens": [0]}, "graphs.prefill_tokens.0", ""),
    ],
)
def test_token_counts_that_leave_nothing_are_refused(
    refused: Any, graphs: dict[str, Any], field: str, reason: str
) -> None:
    found = refused({"dtype": "bfloat16", "graphs": {"use": "cuda_graph", **graphs}}, hardware=H200)
    assert field in found and reason in found[field].reason, found


def test_a_rank_may_not_go_on_eagerly_beside_ranks_that_replay(refused: Any, planned: Any) -> None:
    graphs = {"use": "cuda_graph", "on_failure": "eager"}
    parallel = [{"use": "tensor", "size": 2}]
    config: dict[str, Any] = {"dtype": "bfloat16", "parallel": parallel}
    hardware = read_sheet("8xh200")
    found = refused({**config, "graphs": graphs}, hardware=hardware)["graphs.on_failure"]
    assert "2 ranks exchange tensors of equal sizes" in found.reason
    for fix in ({**graphs, "on_failure": "stop"}, {"use": "eager"}):
        planned({**config, "graphs": fix}, hardware=hardware)


def test_larger_limits_go_on_in_steps() -> None:
    from glowplug.plugins.graphs.cuda_graph import LARGE_COUNTS, TOKEN_COUNTS, CudaGraphOptions

    found = CudaGraphOptions(max_prefill_tokens=2049).token_counts(1 << 20)
    assert found == (*TOKEN_COUNTS, 1792, 2048, 2049)
    assert CudaGraphOptions().token_counts(1 << 20) == TOKEN_COUNTS
    assert CudaGraphOptions().token_counts(5) == (5,)
    both = (*TOKEN_COUNTS, *LARGE_COUNTS)
    large = both[both.index(512) :]
    assert all(after <= 1.25 * before for before, after in itertools.pairwise(large))


def test_several_ranks_capture_every_step_with_prompts(planned: Any) -> None:
    """Launching would take longer than the computing that they share."""
    config = {"dtype": "bfloat16", "context_length": 4096}
    one = planned(config, hardware=read_sheet("8xh200"))
    two = planned(
        {**config, "parallel": [{"use": "tensor", "size": 2}]}, hardware=read_sheet("8xh200")
    )
    assert one.sizes.pass_tokens[-1] == 1536 < one.sizes.max_step_tokens
    assert two.sizes.pass_tokens[-1] == two.sizes.max_step_tokens
    assert two.sizes.pass_tokens[: len(one.sizes.pass_tokens)] == one.sizes.pass_tokens


def test_the_drafts_passes_over_prompts_are_captured_for_the_same_counts(
    planned: Any, tmp_path: Path
) -> None:
    """They add a graph each to the line, and the first of the largest pass."""
    folder = write_config(tmp_path, "v3", num_nextn_predict_layers=1)
    base = {"model": str(folder), "dtype": "bfloat16", "speculative": {"use": "nextn", "steps": 2}}
    plan = planned(base, hardware=H200)
    counts = plan.sizes.extend_tokens
    assert counts == plan.sizes.pass_tokens != ()
    line = next(line for line in plan.budget if line.name == "graphs")
    assert line.how.endswith(
        f"{len(counts)} token counts up to {counts[-1]}, of the draft too, one pool"
    )
    for changes in (
        {"graphs": {"prefill": False}},
        {"graphs": {"use": "eager"}},
        {"speculative": {"use": "none"}},
    ):
        assert planned({**base, **changes}, hardware=H200).sizes.extend_tokens == (), changes


def test_draft_extend_has_a_switch_that_the_plan_shows(planned: Any, tmp_path: Path) -> None:
    folder = write_config(tmp_path, "v3", num_nextn_predict_layers=1)
    base = {"model": str(folder), "dtype": "bfloat16", "speculative": {"use": "nextn"}}

    def size(plan: Any) -> int:
        return next(line.bytes for line in plan.budget if line.name == "graphs")

    captured = planned(base, hardware=H200)
    count = len(captured.sizes.extend_tokens)
    assert decided(captured)["graphs.draft_extend"] == (
        True,
        "default",
        f"in decode steps, and for {count} token counts with prompts",
    )
    eager = planned({**base, "graphs": {"draft_extend": False}}, hardware=H200)
    value, by, why = decided(eager)["graphs.draft_extend"]
    assert (value, by) == (False, "operator") and why.endswith(
        "the draft's pass over a step's tokens runs eagerly"
    )
    assert eager.sizes.extend_tokens == () != eager.sizes.pass_tokens
    assert size(eager) < size(captured)
    assert eager.choice("graphs").options["draft_extend"] is False
    decoding = planned({**base, "graphs": {"prefill": False}}, hardware=H200)
    assert decided(decoding)["graphs.draft_extend"][2] == (
        "in decode steps; steps with prompts are not captured"
    )
    plain = planned({"dtype": "bfloat16", "graphs": {"draft_extend": False}}, hardware=H200)
    why = decided(plain)["graphs.draft_extend"][2]
    assert "no effect: this plan has no draft-extend pass" in why


def test_a_draft_that_waits_for_the_host_is_not_captured_over_prompts(
    planned: Any, plugins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config(tmp_path, "v3", num_nextn_predict_layers=1)
    base = {"model": str(folder), "dtype": "bfloat16", "speculative": {"use": "nextn"}}

    def size(plan: Any) -> int:
        return next(line.bytes for line in plan.budget if line.name == "graphs")

    captured = planned(base, hardware=H200)
    modes = {**EVERY_MODE_GRAPH, Mode.DRAFT_EXTEND: Capture.EAGER}
    components = [found.component for found in plugins.components("speculative")]
    offers = next(component.offers for component in components if component.name == "nextn")
    monkeypatch.setitem(offers.__dict__, "captures_in", replace(offers, modes=modes).captures_in)
    eager = planned(base, hardware=H200)
    assert (
        eager.choice("graphs").name == "cuda_graph"
        and eager.sizes.pass_tokens == captured.sizes.pass_tokens
    )
    assert eager.sizes.extend_tokens == () and "of the draft too" not in str(eager.budget)
    counts, hidden = captured.sizes.extend_tokens, captured.facts.model.hidden_size
    assert size(captured) - size(eager) == len(counts) * PER_PIECE + counts[-1] * (
        2 * hidden + 3 * 8
    )
