"""Whole models with experts distributed over ranks give the logits of one rank, for every layout
and exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug.core.facts.mesh import coordinates
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.protocols import Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.step.batch import Batch, StepShape
from glowplug.core.testing.harness.build import Stepper, build_context, build_model, make, plan_for
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit
from tests.support.rank_threads import on_ranks
from tests.support.slow_cases import some_slow_rows
from tests.support.tiny import V3, write_config
from tests.unit.test_layers import facts_of, random_tensors

pytestmark = pytest.mark.usefixtures("quick_switches")
MODELS = {"v3": "none", "v2": "none", "v3_fp8": "block_fp8"}
EXCHANGES = ("all_gather", "all_to_all", "all_to_all_static")
LAYOUTS: tuple[dict[str, int], ...] = ({"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4})
GROUPED: tuple[dict[str, int], ...] = (
    {"tp": 2, "ep": 2, "dp": 2},
    {"tp": 4, "ep": 2, "dp": 2},
    {"tp": 4, "ep": 4, "dp": 2},
    {"tp": 4, "ep": 4, "dp": 4},
)
ROWS = 4
Step = tuple[dict[int, list[int]], int]  #: tokens by row, and the number of decoding rows


def cases(layouts: tuple[dict[str, int], ...]) -> list[tuple[dict[str, int], str]]:
    return [
        (mesh, exchange)
        for mesh in layouts
        for exchange in EXCHANGES
        if exchange == "all_gather" or mesh["ep"] == mesh["tp"]
    ]


def steps() -> list[Step]:
    """Return prompts of uneven lengths, a step with a second chunk beside decoding rows, decoding
    alone, and one row alone.
    """
    generator = torch.Generator().manual_seed(9)

    def ids(count: int) -> list[int]:
        return torch.randint(2, 150, (count,), generator=generator).tolist()

    return [
        ({0: ids(5), 1: ids(1), 2: ids(9)}, 0),
        ({0: ids(1), 1: ids(1), 2: ids(4), 3: ids(7)}, 2),
        ({row: ids(1) for row in range(ROWS)}, ROWS),
        ({2: ids(1)}, 1),
    ]


@cache
def checkpoint(name: str) -> tuple[ModelFacts, dict[str, Tensor]]:
    facts = facts_of(name)
    return facts, random_tensors(facts, MODELS[name])


class GroupStepper(Stepper):
    """A stepper of one group's rows; groups agree on the largest number of tokens."""

    most = 0

    def _batch(self, chunks: Mapping[int, list[int]], decodes: int) -> Batch:
        batch = super()._batch(chunks, decodes)
        batch.agreed = StepShape(batch.mode, ROWS, self.most)
        return batch


def part(step: Step, group: int, groups: int) -> Step:
    """Return the rows of a group: row r belongs to group r % groups."""
    chunks, decodes = step
    own = {row: ids for row, ids in chunks.items() if row % groups == group}
    return own, sum(row % groups == group for row in list(chunks)[:decodes])


def rank_context(
    name: str, mesh: Mapping[str, int], rank: int, exchange: str, collectives: Any, **more: Any
) -> BuildContext:
    facts = checkpoint(name)[0]
    plan = replace(plan_for(facts), mesh=dict(mesh))
    worker = Worker(
        rank=rank,
        ranks=mesh["tp"],
        device="cpu",
        dtype=torch.float32,
        coordinates=coordinates(rank, mesh),
        collectives=collectives,
    )
    sizes = {
        "tensor": {"size": mesh["tp"]},
        "ep_moe": {"size": mesh["ep"], "exchange": exchange, **more},
        "dp_attention": {"size": mesh.get("dp", 1)},
    }
    strategies = [
        make("parallel", use, plan, worker, **options)
        for use, options in sizes.items()
        if use != "dp_attention" or "dp" in mesh
    ]
    return build_context(
        facts,
        plan,
        quantization=MODELS[name],
        worker=worker,
        collectives=collectives,
        parallel=ParallelStack(strategies),
    )


@cache
def alone(name: str) -> tuple[list[dict[int, Tensor]], dict[str, Tensor]]:
    """Return on one rank the logits of each step by row, and the number of tokens that chose each
    expert, by layer.
    """
    facts, tensors = checkpoint(name)
    model, context = build_model(facts, tensors, quantization=MODELS[name])
    chosen: dict[str, Tensor] = {}
    for layer in model.layers:  # type: ignore[attr-defined]
        gate = getattr(layer.feed_forward, "gate", None)
        if gate is not None:
            gate.forward = counting(gate, chosen)
    stepper = Stepper(model, context, rows=ROWS)
    return [by_row(stepper.logits(*step), step) for step in steps()], chosen


def counting(gate: Any, chosen: dict[str, Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    forward, name = gate.forward, gate.name.removesuffix(".gate")

    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = forward(x)
        found = torch.bincount(ids.flatten(), minlength=gate.sizes.experts)
        chosen[name] = chosen.get(name, torch.zeros_like(found)) + found
        return weights, ids

    return counted


def by_row(logits: Tensor, step: Step) -> dict[int, Tensor]:
    sizes = [len(ids) for ids in step[0].values()]
    return dict(zip(step[0], torch.split(logits, sizes), strict=True))


def run(
    name: str,
    mesh: Mapping[str, int],
    exchange: str,
    backend: str,
    **more: Any,
) -> list[tuple[list[dict[int, Tensor]], dict[str, list[int]]]]:
    """Return by rank the logits of each step by row, and the load."""
    groups = mesh.get("dp", 1)
    checkpoint(name)

    def body(collectives: Any, rank: int) -> tuple[list[dict[int, Tensor]], dict[str, list[int]]]:
        context = rank_context(name, mesh, rank, exchange, collectives, **more)
        model, _ = build_model(*checkpoint(name), context=context)
        stepper = GroupStepper(model, context, rows=ROWS)
        made = []
        for step in steps():
            parts = [part(step, group, groups) for group in range(groups)]
            stepper.most = max(sum(map(len, chunks.values())) for chunks, _ in parts)
            own = parts[coordinates(rank, mesh)["dp"]]
            made.append(by_row(stepper.logits(*own), own))
        return made, context.parallel.expert_load()

    return on_ranks(mesh, backend, body)


def assert_as_alone(
    name: str, mesh: Mapping[str, int], exchange: str, backend: str, **more: Any
) -> None:
    """Compare ranks with one rank. ``more``: further options of the strategy "ep_moe"."""
    want, chosen = alone(name)
    found = run(name, mesh, exchange, backend, **more)
    heard: list[set[int]] = [set() for _ in want]
    for made, _ in found:
        for rows, wanted, seen in zip(made, want, heard, strict=True):
            seen.update(rows)
            for row, logits in rows.items():
                torch.testing.assert_close(logits, wanted[row], atol=1e-5, rtol=1e-5)
    assert heard == [set(step[0]) for step in steps()]
    for layer, counts in chosen.items():
        assert [
            sum(column) for column in zip(*(load[layer] for _, load in found), strict=True)
        ] == counts.tolist()
    assert all(set(load) == set(chosen) for _, load in found) and chosen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mesh", "exchange"), cases(LAYOUTS), ids=str)
def test_every_rank_has_the_logits_of_one(name: str, mesh: dict[str, int], exchange: str) -> None:
    assert_as_alone(name, mesh, exchange, "threads")


#: groups of these models that are slow; exchanges carry the rows of all models alike
SLOW_GROUPS = {"v2": GROUPED[1:], "v3": (), "v3_fp8": GROUPED[::2]}
GROUPED_ROWS = [(*case, name) for case in cases(GROUPED) for name in MODELS]


@pytest.mark.parametrize(
    ("mesh", "exchange", "name"),
    some_slow_rows(GROUPED_ROWS, [row for row in GROUPED_ROWS if row[0] in SLOW_GROUPS[row[2]]]),
    ids=str,
)
def test_groups_with_rows_of_their_own(name: str, mesh: dict[str, int], exchange: str) -> None:
    """Groups are uneven, one of them without work in the last step."""
    assert_as_alone(name, mesh, exchange, "threads")


@pytest.mark.parametrize(
    ("mesh", "exchange"), cases(({"tp": 4, "ep": 4, "dp": 2}, {"tp": 2, "ep": 2})), ids=str
)
def test_over_gloo(mesh: dict[str, int], exchange: str) -> None:
    assert_as_alone("v3", mesh, exchange, "gloo")


def test_a_rank_reads_its_own_experts_only() -> None:
    """Tensors of the other experts are reported as elsewhere."""

    def body(collectives: Any, rank: int) -> tuple[set[str], list[bool]]:
        context = rank_context("v3", {"tp": 4, "ep": 4}, rank, "all_gather", collectives)
        model, _ = build_model(*checkpoint("v3"), context=context)
        names = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(8)]
        return {target.name for target in model.targets()} & set(names), [
            model.ignored(name) for name in names
        ]

    for rank, (read, ignored) in enumerate(on_ranks({"tp": 4, "ep": 4}, "threads", body)):
        own = (2 * rank, 2 * rank + 1)
        assert read == {f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in own}
        assert ignored == [expert not in own for expert in range(8)]


@pytest.mark.parametrize("dp", [0, 2])
@pytest.mark.parametrize("counted", [True, False])
def test_info_shows_the_load_of_what_was_served(tmp_path: Path, dp: int, counted: bool) -> None:
    """Warm-up is not counted: every token computed since then chose its experts once, over all
    ranks together.
    """
    parallel: list[dict[str, Any]] = [
        {"use": "tensor", "size": 4},
        {"use": "ep_moe", "size": 4, "count_load": counted},
    ]
    parallel += [{"use": "dp_attention", "size": dp}] if dp else []
    config = {
        "model": str(write_config(tmp_path / "v3", "v3")),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 64,
        "memory": {"kv_tokens": 512},
        "weights": {"use": "random"},
        "scheduler": {"overlap": False, "max_running_requests": 4},
        "cache": {"use": "none"},
        "parallel": parallel,
    }
    prompts = {1: [5, 6, 7], 2: [9], 3: [4, 8, 15, 16, 23, 42, 7]}
    with RankSet(rank_plan(config)) as ranks:
        ranks.run([submit(id, prompt, 6) for id, prompt in prompts.items()])
        info = ranks.control("info").data
    if not counted:
        assert all("expert_load" not in rank for rank in info["ranks"])
        return
    loads = [rank["expert_load"] for rank in info["ranks"]]
    assert set(loads[0]) == {"model.layers.1.mlp", "model.layers.2.mlp"}
    computed = sum(len(prompt) + 6 - 1 for prompt in prompts.values())
    for layer in loads[0]:
        assert sum(sum(load[layer]) for load in loads) == computed * V3["num_experts_per_tok"]
