"""``scheduler.last_layer`` in the plan: by default on a device, on request on a CPU, and never
where all tokens are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plan.plan import EnginePlan
from tests.plan.test_growing_segments import H200
from tests.support.tiny import write_config

FIELD = "scheduler.last_layer"


def said(plan: EnginePlan) -> list[tuple[object, str]]:
    return [(d.value, d.by) for d in plan.decisions if d.field == FIELD]


def test_sampled_tokens_only_is_the_default_on_a_device(planned) -> None:
    plan = planned({"dtype": "bfloat16"}, hardware=H200)
    assert plan.device == "cuda" and plan.sampled_last_layer and said(plan) == [("sampled", "auto")]
    assert EnginePlan.from_json(plan.to_json()).sampled_last_layer
    plan = planned({"dtype": "bfloat16", "scheduler": {"last_layer": "all"}}, hardware=H200)
    assert not plan.sampled_last_layer and [value for value, _ in said(plan)] == ["all"]


def test_sampled_tokens_only_is_possible_on_a_cpu(planned) -> None:
    assert not planned({}).sampled_last_layer
    plan = planned({"scheduler": {"last_layer": "sampled"}})
    assert plan.sampled_last_layer and [value for value, _ in said(plan)] == ["sampled"]


ALL: dict[str, dict[str, Any]] = {
    "drafts": {"speculative": {"use": "nextn", "steps": 2}},
    "ranks": {"parallel": [{"use": "tensor", "size": 2}, {"use": "dp_attention", "size": 2}]},
}


@pytest.mark.parametrize("why", ALL)
def test_all_tokens_run_where_all_are_read(planned, refused, why: str, tmp_path: Path) -> None:
    model = write_config(tmp_path, "v3", num_nextn_predict_layers=1)
    given = {"model": str(model), "device": "cpu", **ALL[why]}
    assert not planned(given).sampled_last_layer
    found = refused({**given, "scheduler": {"last_layer": "sampled"}})
    assert set(found) == {FIELD} and 'scheduler.last_layer = "all"' in str(found[FIELD])


def test_a_family_without_support_runs_all_tokens(planned, refused, tmp_path: Path) -> None:
    model = {"model": str(write_config(tmp_path, "llama"))}
    plan = planned({**model, "dtype": "bfloat16"}, hardware=H200)
    assert not plan.sampled_last_layer and said(plan) == [("all", "auto")]
    assert FIELD in refused({**model, "scheduler": {"last_layer": "sampled"}})
