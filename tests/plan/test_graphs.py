"""Which steps are captured, as the plan says it: chosen by itself, clipped, or refused with the reason."""
from __future__ import annotations

from typing import Any

import pytest

from glowplug.core.machine import read_sheet

H200 = read_sheet("1xh200")


def decided(plan: Any) -> dict[str, tuple[Any, str, str]]:
    return {decision.field: (decision.value, decision.by, decision.why) for decision in plan.decisions}


def test_a_device_captures_by_itself(planned: Any) -> None:
    plan = planned({"dtype": "bfloat16"}, hardware=H200)
    assert plan.choice("graphs").name == "cuda_graph"
    sizes, by, why = decided(plan)["graphs.batch_sizes"]
    assert sizes[0] == 1 and sizes[-1] == plan.sizes.max_running == 256 and by == "size"
    assert "256 of 256 sequences" in why
    line = next(line for line in plan.budget if line.name == "graphs")
    assert line.bytes > 0 and str(len(sizes)) in line.how
    eager = planned({"dtype": "bfloat16", "graphs": {"use": "eager"}}, hardware=H200)
    assert "graphs" not in {line.name for line in eager.budget} and "graphs.batch_sizes" not in decided(eager)


@pytest.mark.parametrize(("graphs", "want", "why"), [
    ({"batch_sizes": [1, 8, 300]}, [1, 8], "without 300: 16 sequences run at most"),
    ({"batch_sizes": [4, 8], "max_batch": 4}, [4], "without 8: graphs.max_batch is lower"),
    ({"max_batch": 2}, [1, 2], "default, up to 2 of 16 sequences"),
])
def test_sizes_that_cannot_come_are_left_out(planned: Any, graphs: dict[str, Any], want: list[int], why: str) -> None:
    plan = planned({"dtype": "bfloat16", "scheduler": {"max_running_requests": 16},
                    "graphs": {"use": "cuda_graph", **graphs}}, hardware=H200)
    assert decided(plan)["graphs.batch_sizes"] == (want, "size", why)


@pytest.mark.parametrize(("config", "field", "reason", "fix"), [
    ({"graphs": {"batch_sizes": [8, 9], "max_batch": 4}}, "graphs.max_batch", "above 4", "graphs.max_batch = 9"),
    ({"graphs": {"batch_sizes": [20]}, "scheduler": {"max_running_requests": 16}}, "graphs.batch_sizes",
     "above the 16 sequences", "graphs.batch_sizes = [16]"),
    ({"graphs": {}, "attention": {"use": "torch_mla"}}, "graphs.use", "torch_mla syncs with the host", "eager"),
    ({"graphs": {"batch_sizes": []}}, "graphs.batch_sizes", "", ""),
    ({"graphs": {"batch_sizes": [0, 1]}}, "graphs.batch_sizes.0", "", ""),
])
def test_what_leaves_nothing_to_capture_is_refused(refused: Any, config: dict[str, Any], field: str, reason: str,
                                                   fix: str) -> None:
    found = refused({"dtype": "bfloat16", **config, "graphs": {"use": "cuda_graph", **config["graphs"]}},
                    hardware=H200)
    assert field in found, found
    assert reason in found[field].reason and fix in found[field].fix


def test_ranks_step_eagerly_and_it_is_said(planned: Any) -> None:
    plan = planned({"dtype": "bfloat16", "parallel": [{"use": "tensor", "size": 2}]}, hardware=read_sheet("8xh200"))
    assert plan.choice("graphs").name == "eager"
    assert "steps of 2 ranks exchange through collectives" in decided(plan)["graphs.use"][2]
