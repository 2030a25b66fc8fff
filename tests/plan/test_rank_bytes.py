"""Bytes of each rank: their sum against the checkpoint, and the budget against the ranks'
allocations.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug.core.engine.engine import Engine
from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.model_folder import embedded_path, read_folder
from glowplug.core.plan.budget.weights import Storage, number_bytes, parts_of, weights_by_rank
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan
from glowplug.models.deepseek.inventory import deepseek_inventory
from glowplug.models.families import llama_inventory
from tests.support.reading import declared, parameters, read_config, read_shape, stored
from tests.support.tiny import CONFIGS, write_config

MESHES = [
    {},
    {"tp": 2},
    {"tp": 4},
    {"tp": 4, "ep": 4},
    {"tp": 4, "ep": 2},
    {"tp": 4, "dp": 2},
    {"tp": 4, "dp": 4},
    {"tp": 4, "ep": 2, "dp": 2},
    {"tp": 4, "ep": 4, "dp": 4},
    {"tp": 2, "ep": 2, "dp": 1},
]
USES = {"tp": "tensor", "ep": "ep_moe", "dp": "dp_attention"}
STORAGES = [Storage(4, False, True), Storage(2, True, False), Storage(2, False, False)]


# ---- arithmetic ----------------------------------------------------------------------------------


def test_published_sizes() -> None:
    v3 = read_shape("deepseek-v3").elements
    assert parameters(v3) == 671_026_419_200  # the sum in its own index.json
    draft = sum(count for kind, count in v3.items() if kind.draft == 0 and not kind.scale)
    assert draft == pytest.approx(11.6e9, rel=0.01)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "tiny-v3", "tiny-llama"])
def test_ranks_add_up_to_the_model_and_its_copies(
    name: str, storage: Storage, mesh: dict[str, int]
) -> None:
    """Every class counts once, times the copies that the mesh makes of it; nothing is lost or
    counted twice.
    """
    model, elements = read_shape(name)
    ranks = mesh.get("tp", 1)
    for drafts in (False, True):
        whole = 0
        for kind, count in elements.items():
            if kind.draft != (0 if drafts else -1):
                continue
            vocabulary = kind.role in ("vocab", "tied")
            parts = (
                axis_size("attn_tp", mesh)
                if vocabulary
                else parts_of(kind.role, model, mesh, "ep" in mesh)
            )
            whole += count * number_bytes(kind, storage) * (ranks // parts)
        assert sum(weights_by_rank(elements, model, mesh, ranks, storage, drafts)) == whole


def test_an_uneven_vocabulary_is_on_the_first_ranks() -> None:
    model, elements = read_config({**CONFIGS["v3"], "vocab_size": 158})
    held = weights_by_rank(elements, model, {"tp": 4}, 4, STORAGES[0], False)
    assert held[0] == held[1] == held[2]
    assert (
        held[0] - held[3] == 2 * 2 * model.hidden_size * 4
    )  # 40 rows against 38, in two tables of float32


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.3.mlp.experts.17.down_proj.weight", "experts"),
        ("model.layers.3.mlp.experts.17.down_proj.weight_scale_inv", "experts"),
        ("model.layers.0.mlp.down_proj.weight", "width"),
        ("model.layers.0.mlp.up_proj.bias", "width"),
        ("model.layers.0.mlp.down_proj.bias", "whole"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight_scale_inv", "shared"),
        ("model.embed_tokens.weight", "vocab"),
        ("lm_head.weight", "vocab"),
        ("model.layers.61.embed_tokens.weight", "vocab"),
        ("model.layers.61.shared_head.head.weight", "vocab"),
        ("model.layers.61.shared_head.norm.weight", "whole"),
        ("model.layers.61.eh_proj.weight", "whole"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "whole"),
        ("model.layers.0.self_attn.kv_b_proj.weight", "kv_up"),
        ("model.layers.0.self_attn.o_proj.weight", "heads"),
        ("model.layers.0.self_attn.o_proj.bias", "whole"),
        ("model.layers.0.self_attn.q_b_proj.qweight", "heads"),
        ("model.layers.4.mlp.gate.weight", "router"),
        ("model.layers.4.mlp.gate.e_score_correction_bias", "router"),
        ("something.else.entirely", "whole"),
    ],
)
def test_classes_by_name(name: str, role: str) -> None:
    assert deepseek_inventory(read_shape("deepseek-v3").facts).role_of(name) == role


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.1.self_attn.q_proj.bias", "heads"),
        ("model.layers.0.self_attn.k_proj.bias", "kv_heads"),
        ("model.layers.0.self_attn.v_proj.weight", "kv_heads"),
        ("model.embed_tokens.weight", "tied"),
    ],
)
def test_classes_of_llama_by_name(name: str, role: str) -> None:
    assert llama_inventory(read_config(CONFIGS["llama"]).facts).role_of(name) == role


def test_headers_and_arithmetic_agree_on_the_embedded_model() -> None:
    facts = read_folder(embedded_path())
    assert facts is not None
    counted, read = declared(facts), stored(facts)
    # its NextN layer has an embedding and a head of its own, and a checkpoint may keep any tensor
    # in another dtype
    for drafts in (0, -1):
        for role in {kind.role for kind in read}:
            own, other = (
                sum(
                    count
                    for kind, count in found.items()
                    if (kind.role, kind.draft, kind.scale) == (role, drafts, False)
                )
                for found in (read, counted)
            )
            assert own == other or (role == "vocab" and drafts == 0), (role, drafts)
    scales = [sum(n for kind, n in found.items() if kind.scale) for found in (counted, read)]
    assert scales[0] == scales[1] > 0


# ---- what ranks allocate -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS], entry_points=False)


def tensors_of(thing: object, seen: dict[int, object]) -> Iterator[torch.Tensor]:
    """Yield every tensor that a model's layers and methods hold; rotary tables have a line of the
    budget of their own.
    """
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for item in thing:
            yield from tensors_of(item, seen)
    elif type(thing).__module__.startswith(
        (
            *("glowplug.core.layers", "glowplug.models.", "glowplug.plugins.quant"),
            *("glowplug_", "tests.plugins."),
        )
    ):
        for name, value in vars(thing).items():
            if name not in ("rope", "_embedding"):
                yield from tensors_of(value, seen)


def held_bytes(model: object) -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(model, {})
    }
    return sum(storages.values())


def lines(plan: EnginePlan, rank: int) -> dict[str, int]:
    return {line.name: line.on(rank) for line in plan.budget}


def compare(plan: EnginePlan, engine: Engine, rank: int) -> None:
    planned, runner = lines(plan, rank), engine.runner
    assert held_bytes(runner.model) == planned["weights"], f"weights of rank {rank}"
    draft: Any = getattr(runner.speculative, "_model", None)
    assert (held_bytes(draft) if draft is not None else 0) == planned.get("draft weights", 0), (
        f"draft of rank {rank}"
    )
    pool = {id(t): t.nbytes for layer in runner.attention._kv for t in layer.values()}
    assert sum(pool.values()) == planned["kv cache"] == plan.sizes.kv_bytes, f"cache of rank {rank}"
    if draft is not None:
        assert runner.speculative._page_ends.states.nbytes == planned["page states"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("name", "changes", "steps"),
    [
        ("v3", {"num_nextn_predict_layers": 1, "vocab_size": 158}, 2),
        ("v3_fp8", {}, 0),
        ("v2", {}, 0),
        ("llama", {"vocab_size": 159}, 0),
    ],
)
def test_the_budget_equals_the_ranks_allocations(
    plugins: PluginSet,
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    steps: int,
    mesh: dict[str, int],
) -> None:
    if name == "llama" and "ep" in mesh:
        return  # it has no experts, so the plan refuses
    config: dict[str, Any] = {
        "model": str(write_config(tmp_path, name, **changes)),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "device": "cpu",
        "memory": {"kv_tokens": 256},
        "scheduler": {"max_running_requests": 2, "chunk_size": 8},
        "parallel": [{"use": USES[axis], "size": size} for axis, size in mesh.items()],
    }
    if steps:
        config["speculative"] = {"use": "nextn", "adaptive": False, "steps": steps}
    plan = rank_plan(config, plugins)
    assert plan.mesh == mesh
    with RankSet(plan, plugins) as ranks:
        for rank, engine in enumerate(ranks.engines):
            compare(plan, engine, rank)


@pytest.mark.parametrize(
    "mesh", [{"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4}], ids=str
)
@pytest.mark.parametrize(("name", "steps"), [("v3", 2), ("v3_fp8", 0), ("v2", 0)])
def test_the_budget_counts_redundant_experts(
    plugins: PluginSet, tmp_path: Path, name: str, steps: int, mesh: dict[str, int]
) -> None:
    """Each rank holds its share of the experts and of their copies, of the draft's layer too."""
    folder = write_config(tmp_path, name, **({"num_nextn_predict_layers": 1} if steps else {}))
    config: dict[str, Any] = {
        "model": str(folder),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "device": "cpu",
        "memory": {"kv_tokens": 256},
        "scheduler": {"max_running_requests": 2, "chunk_size": 8},
        "parallel": [{"use": USES[axis], "size": size} for axis, size in mesh.items()],
    }
    if steps:
        config["speculative"] = {"use": "nextn", "adaptive": False, "steps": steps}
    without = rank_plan(config, plugins)
    config["parallel"][1]["redundant_experts"] = 4
    plan = rank_plan(config, plugins)
    lines_before, lines_now = lines(without, 0), lines(plan, 0)
    facts = plan.facts.model
    copies = 4 * 3 * facts.hidden_size * facts.sizes.expert_width * 4 // mesh["tp"]
    assert lines_now["weights"] - lines_before["weights"] == 2 * copies
    if steps:
        assert lines_now["draft weights"] - lines_before["draft weights"] == copies
    with RankSet(plan, plugins) as ranks:
        for rank, engine in enumerate(ranks.engines):
            compare(plan, engine, rank)


@pytest.mark.parametrize("redundant", [0, 4, 8])
def test_the_embedded_model_from_its_headers(plugins: PluginSet, redundant: int) -> None:
    """The checkpoint is read and dequantised, with a draft that has its own embedding and head,
    over four ranks, also with redundant experts.
    """
    experts = {"use": "ep_moe", "size": 4, "redundant_experts": redundant}
    groups = {"use": "dp_attention", "size": 2}
    config = {
        "model": "embedded",
        "device": "cpu",
        "memory": {"kv_tokens": 256},
        "context_length": 64,
        "scheduler": {"max_running_requests": 2, "chunk_size": 8},
        "speculative": {"use": "nextn"},
        "parallel": [{"use": "tensor", "size": 4}, *([experts] if redundant else []), groups],
    }
    plan = rank_plan(config, plugins)
    how = next(line for line in plan.budget if line.name == "weights").how
    copies = f", {redundant} redundant experts in each layer" if redundant else ""
    assert how == f"tensor headers, over 4 ranks{copies}"
    with RankSet(plan, plugins) as ranks:
        for rank, engine in enumerate(ranks.engines):
            compare(plan, engine, rank)
