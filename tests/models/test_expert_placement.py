"""Whole models whose experts are placed by load, with copies, give the logits of one rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.engine.engine import Engine
from glowplug.core.facts.expert_load import recorded_load
from glowplug.core.testing.harness.build import build_model
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, run_ranks, submit
from tests.models.test_expert_parallel import (
    GROUPED,
    LAYOUTS,
    MODELS,
    assert_as_alone,
    cases,
    checkpoint,
    rank_context,
)
from tests.support.rank_threads import on_ranks
from tests.support.tiny import write_config

pytestmark = pytest.mark.usefixtures("quick_switches")
EXPERTS = 8
#: two layers with different orders of load, so that their placements differ
RECORD = {
    "model": "tiny",
    "architecture": "DeepseekV3ForCausalLM",
    "layers": {
        "model.layers.1.mlp": (900, 30, 500, 70, 0, 10, 260, 40),
        "model.layers.2.mlp": (5, 60, 10, 300, 900, 200, 1, 30),
    },
}
PROMPTS = {1: [5, 6, 7], 2: [9], 3: [4, 8, 15, 16, 23, 42, 7], 4: [11, 12, 13, 14]}


@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mesh", "exchange"), cases(LAYOUTS), ids=str)
def test_every_rank_has_the_logits_of_one(
    name: str, mesh: dict[str, int], exchange: str, redundant: int
) -> None:
    options = {"placement": RECORD, "redundant_experts": redundant}
    assert_as_alone(name, mesh, exchange, "threads", **options)


@pytest.mark.parametrize(("mesh", "exchange"), cases(GROUPED), ids=str)
def test_groups_with_rows_of_their_own(mesh: dict[str, int], exchange: str) -> None:
    options = {"placement": RECORD, "redundant_experts": EXPERTS}
    assert_as_alone("v3", mesh, exchange, "threads", **options)


@pytest.mark.parametrize(
    ("mesh", "exchange"), cases(({"tp": 4, "ep": 4, "dp": 2}, {"tp": 2, "ep": 2})), ids=str
)
def test_over_gloo(mesh: dict[str, int], exchange: str) -> None:
    assert_as_alone("v3", mesh, exchange, "gloo", placement=RECORD, redundant_experts=4)


def test_a_rank_reads_the_experts_of_its_slots_only() -> None:
    mesh = {"tp": 4, "ep": 4}

    def body(collectives: Any, rank: int) -> list[tuple[list[int], list[int]]]:
        options = {"placement": RECORD, "redundant_experts": 4}
        context = rank_context("v3", mesh, rank, "all_gather", collectives, **options)
        model, _ = build_model(*checkpoint("v3"), context=context)
        targets = {target.name for target in model.targets()}
        found = []
        for layer in (1, 2):
            names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for e in range(EXPERTS)]
            found.append(
                (
                    [e for e, name in enumerate(names) if name in targets],
                    [e for e, name in enumerate(names) if not model.ignored(name)],
                )
            )
        return found

    by_rank = on_ranks(mesh, "threads", body)
    for layer in (0, 1):
        held = [read for read, _ in (found[layer] for found in by_rank)]
        assert all(read == kept and len(read) == 3 for read, kept in (f[layer] for f in by_rank))
        assert {expert for read in held for expert in read} == set(range(EXPERTS))
        counts = RECORD["layers"][f"model.layers.{layer + 1}.mlp"]  # type: ignore[index]
        loaded = counts.index(900)
        assert sum(loaded in read for read in held) >= 2
    assert [found[0] for found in by_rank] != [found[1] for found in by_rank]


# ---- engines -------------------------------------------------------------------------------------


def config_of(folder: Path, parallel: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "model": str(write_config(folder / "v3", "v3", num_nextn_predict_layers=1)),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 64,
        "memory": {"kv_tokens": 512},
        "weights": {"use": "random"},
        "scheduler": {"max_running_requests": 4, "chunk_size": 16},
        **({"parallel": parallel} if parallel else {}),
        **more,
    }


def strategies(mesh: Mapping[str, int], **options: Any) -> list[dict[str, Any]]:
    uses = {"tp": "tensor", "ep": "ep_moe", "dp": "dp_attention"}
    return [
        {"use": uses[axis], "size": size, **(options if axis == "ep" else {})}
        for axis, size in mesh.items()
    ]


def recorded(folder: Path) -> str:
    path = folder / "load.json"
    path.write_text(json.dumps(RECORD))
    return str(path)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("mesh", "exchange"),
    [
        ({"tp": 2, "ep": 2}, "all_to_all_static"),
        ({"tp": 2, "ep": 2, "dp": 2}, "all_gather"),
        ({"tp": 4, "ep": 2, "dp": 2}, "all_gather"),
        ({"tp": 4, "ep": 4, "dp": 4}, "all_to_all"),
    ],
    ids=str,
)
def test_ranks_give_the_tokens_of_one(
    tmp_path: Path, mesh: dict[str, int], exchange: str, steps: int
) -> None:
    """Drafts come from a layer without a recorded load, whose experts are placed evenly."""
    more = {"speculative": {"use": "nextn", "adaptive": False, "steps": steps}} if steps else {}
    requests = [submit(id, prompt, 6) for id, prompt in PROMPTS.items()]
    alone = run_ranks(config_of(tmp_path, [], **more), requests)
    options = {"placement": recorded(tmp_path), "redundant_experts": 4, "exchange": exchange}
    found = run_ranks(config_of(tmp_path, strategies(mesh, **options), **more), requests)
    assert {id: one.tokens for id, one in found.items()} == {
        id: one.tokens for id, one in alone.items()
    }


def experts_of(engine: Engine, layer: int) -> tuple[int, ...]:
    model: Any = engine.runner.model
    return tuple(model.layers[layer].feed_forward.experts.numbers)


def test_a_recorded_load_places_the_experts_of_the_next_start(tmp_path: Path) -> None:
    """Counts start anew on request; a record has the layers of the model and its draft."""
    more = {"speculative": {"use": "nextn", "adaptive": False, "steps": 1}}
    mesh = {"tp": 2, "ep": 2, "dp": 2}
    with RankSet(rank_plan(config_of(tmp_path, strategies(mesh), **more))) as ranks:
        ranks.run([submit(1, [3] * 9, 4)])
        assert ranks.control("forget_load").ok
        forgotten = recorded_load("tiny", "DeepseekV3ForCausalLM", ranks.control("info").data)
        ranks.run([submit(id, prompt, 6) for id, prompt in PROMPTS.items()])
        info = ranks.control("info").data
        consecutive = [experts_of(engine, 1) for engine in ranks.engines]
    assert forgotten is not None and not any(map(sum, forgotten.layers.values()))
    load = recorded_load("tiny", "DeepseekV3ForCausalLM", info)
    assert load is not None and set(load.layers) == {f"model.layers.{n}.mlp" for n in (1, 2, 3)}
    (tmp_path / "load.json").write_text(load.model_dump_json())
    options = {"placement": str(tmp_path / "load.json"), "redundant_experts": 2}
    plan = rank_plan(config_of(tmp_path, strategies(mesh, **options), **more))
    balance = next(one.value for one in plan.decisions if one.field == "parallel.1.balance")
    assert float(balance.rstrip("%")) > 90
    with RankSet(plan) as ranks:
        ranks.run([submit(id, prompt, 6) for id, prompt in PROMPTS.items()])
        again = recorded_load("tiny", "DeepseekV3ForCausalLM", ranks.control("info").data)
        placed = [experts_of(engine, 1) for engine in ranks.engines]
    assert again is not None and again.layers == load.layers
    assert [len(held) for held in consecutive] == [4, 4] and [len(held) for held in placed] == [
        5,
        5,
    ]
