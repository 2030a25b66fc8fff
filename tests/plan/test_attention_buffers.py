"""Memory that attention reserves beside its cache is a line of the plan, equal to the rank's
allocation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glowplug.core.errors import PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet
from glowplug.plugins.attention.mla.flashinfer import WORKSPACE_BYTES
from tests.gpu.traced_memory import plugins_of_the_card
from tests.support.source_tree import ROOT

LONG = 163840
LINE = "attention buffers"


@pytest.fixture(scope="module")
def card() -> Iterator[PluginSet]:
    yield plugins_of_the_card()


def planned(
    folder: Path, card: PluginSet, use: str, rows: int = 512, drafts: bool = True, **config: Any
) -> EnginePlan:
    """Return the plan of a V3 of few layers with the published context length."""
    shape = json.loads((ROOT / "models" / "shapes" / "deepseek-v3.json").read_text())
    (folder / "config.json").write_bytes(
        msgspec.json.encode(
            {
                **shape,
                "num_hidden_layers": 5,
                "num_nextn_predict_layers": 1,
                "max_position_embeddings": LONG,
            }
        )
    )
    given = {
        "model": str(folder),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "context_length": LONG - 8,
        "attention": {"use": use},
        "scheduler": {"max_running_requests": rows},
        **config,
    }
    if drafts:
        given["speculative"] = {"use": "nextn", "steps": 2}
    return make_plan(given, plugins=card, hardware=read_sheet("1xh200"))


def lines(plan: EnginePlan) -> dict[str, int]:
    return {line.name: line.bytes for line in plan.budget}


def graph_buffers(plan: EnginePlan, rows: int) -> int:
    """Return the bytes of an int32 for every position of every row."""
    return (rows + 1) * -(-plan.sizes.positions // plan.sizes.page_size) * plan.sizes.page_size * 4


@pytest.mark.parametrize(
    ("use", "beside"), [("fa3_mla", 0), ("flashmla", 0), ("flashinfer_mla", WORKSPACE_BYTES)]
)
def test_a_drafts_slots_at_a_long_context(
    use: str, beside: int, card: PluginSet, tmp_path: Path
) -> None:
    """There is one slot for every position, whatever the number of batch sizes and passes; the
    cache is smaller by these bytes.
    """
    other = planned(tmp_path, card, "hopper_mla")
    plan = planned(tmp_path, card, use)
    found, without = lines(plan), lines(other)
    assert found[LINE] == graph_buffers(plan, 512) + beside > 320 << 20 and LINE not in without
    assert {
        name: size for name, size in found.items() if name not in (LINE, "kv cache", "page states")
    } == {name: size for name, size in without.items() if name not in ("kv cache", "page states")}
    page = (
        plan.sizes.kv_bytes // plan.sizes.num_pages + found["page states"] // plan.sizes.num_pages
    )
    assert (
        0 <= (other.sizes.num_pages - plan.sizes.num_pages) * page - found[LINE] + page < 2 * page
    )
    room = int(read_sheet("1xh200").devices[0].memory * 0.98)
    assert 0 <= room - sum(found.values()) < page


def test_one_table_serves_every_captured_size(card: PluginSet, tmp_path: Path) -> None:
    few = planned(tmp_path, card, "fa3_mla", graphs={"use": "cuda_graph", "batch_sizes": [512]})
    many = planned(
        tmp_path,
        card,
        "fa3_mla",
        graphs={"use": "cuda_graph", "batch_sizes": list(range(8, 513, 8))},
    )
    none = planned(tmp_path, card, "fa3_mla", graphs={"use": "eager"})
    assert lines(few)[LINE] == lines(many)[LINE] == lines(none)[LINE] == graph_buffers(few, 512)


def test_without_a_draft_only_pages_in_parts_are_kept(card: PluginSet, tmp_path: Path) -> None:
    plan = planned(tmp_path, card, "fa3_mla", drafts=False)
    assert lines(plan)[LINE] == graph_buffers(plan, 512) // 64 * 2
    assert LINE not in lines(planned(tmp_path, card, "flashmla", drafts=False))
    assert lines(planned(tmp_path, card, "flashinfer_mla", drafts=False))[LINE] == WORKSPACE_BYTES


def test_tables_that_do_not_fit_are_refused_by_name(card: PluginSet, tmp_path: Path) -> None:
    """4096 rows of 160k tokens take 2.5 GiB; the rank's share has at most 1 GiB left."""
    other = planned(tmp_path, card, "hopper_mla", rows=4096, graphs={"use": "eager"})
    rest = sum(
        size for name, size in lines(other).items() if name not in ("kv cache", "page states")
    )
    kept = int(read_sheet("1xh200").devices[0].memory * 0.98) - rest - (1 << 30)
    with pytest.raises(PlanRefused) as caught:
        planned(
            tmp_path,
            card,
            "fa3_mla",
            rows=4096,
            graphs={"use": "eager"},
            memory={"reserve_bytes": kept},
        )
    (refusal,) = caught.value.refusals
    assert refusal.field == "attention.use" and f"{LINE} 2.5 GiB" in refusal.reason
    assert "shorter context_length" in refusal.fix
    assert planned(
        tmp_path,
        card,
        "hopper_mla",
        rows=4096,
        graphs={"use": "eager"},
        context_length=4096,
        memory={"reserve_bytes": kept},
    )
