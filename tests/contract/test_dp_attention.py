"""Data-parallel attention: the shards of each rank, agreement among ranks, routing of requests, and
tokens that cross groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.mesh import coordinates
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape, shorter_shapes
from glowplug.core.plugin.offers import Mode
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import Worker
from glowplug.core.step.batch import Batch, StepShape, idle_batch, shape_of
from glowplug.core.step.request import SamplingParams, Sequence
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.ranks import THREADS
from glowplug.core.testing.harness.threads import ThreadOptions
from glowplug.core.testing.harness.threads_runtime import MEETINGS, Meeting, ThreadCollectives
from glowplug.core.testing.suites.parallel import ParallelSuite
from glowplug.plugins.parallel.dp_attention import DpAttentionOptions
from glowplug.plugins.parallel.dp_attention_runtime import DpAttention
from glowplug.plugins.parallel.request_router import GroupLoad
from tests.support.tiny import write_config

MESHES = [{"tp": 2, "dp": 2}, {"tp": 4, "dp": 2}, {"tp": 4, "dp": 4}, {"tp": 4, "dp": 1}]


def made(
    mesh: dict[str, int], rank: int, rendezvous: str = "apart", plan: EnginePlan | None = None
) -> DpAttention:
    """Return the strategy of one rank; ranks with the same ``rendezvous`` exchange."""
    plan, meeting = (
        replace(plan or bare_plan(), mesh=mesh),
        MEETINGS.setdefault(rendezvous, Meeting()),
    )
    assert not meeting.over
    worker = Worker(
        rank=rank, ranks=mesh["tp"], coordinates=coordinates(rank, mesh), rendezvous=rendezvous
    )
    joined = replace(
        worker, collectives=ThreadCollectives(ThreadOptions(timeout=10.0), plan, worker)
    )
    return DpAttention(DpAttentionOptions(size=mesh["dp"]), plan, joined)


def each(
    mesh: dict[str, int],
    work: Callable[[DpAttention, int], Any],
    plan: EnginePlan | None = None,
) -> list[Any]:
    """Run ``work(strategy, rank)`` on all ranks at the same time, and return the results by
    rank.
    """
    MEETINGS["together"] = Meeting()
    found: dict[int, Any] = {}
    ranks = [made(mesh, rank, "together", plan) for rank in range(mesh["tp"])]
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: work(ranks[rank], rank)}))
        for rank in range(mesh["tp"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(mesh["tp"])]


class TestTwoGroups(ParallelSuite):
    mesh = {"tp": 4, "dp": 2}
    ranks = 4

    def make(self, rank: int) -> DpAttention:
        return made(self.mesh, rank)


class TestAGroupEach(TestTwoGroups):
    mesh = {"tp": 4, "dp": 4}


class TestOneGroup(TestTwoGroups):
    mesh = {"tp": 4, "dp": 1}


# ---- shards --------------------------------------------------------------------------------------


def test_attention_and_vocabulary_are_split_within_a_group_and_nothing_else() -> None:
    for rank in range(4):
        strategy, within = made({"tp": 4, "dp": 2}, rank), rank % 2
        heads = strategy.shard("heads", "model.layers.0.self_attn", 8)
        out = strategy.shard("heads_row", "model.layers.0.self_attn.o_proj", 8)
        vocab = strategy.shard("vocab", "lm_head", 9)
        assert heads is not None and (heads.start, heads.size, heads.reduce) == (
            4 * within,
            4,
            False,
        )
        assert out is not None and (out.start, out.size, out.reduce, out.axis) == (
            4 * within,
            4,
            True,
            "attn_tp",
        )
        assert vocab is not None and (vocab.start, vocab.size, vocab.axis) == (
            5 * within,
            5 - within,
            "attn_tp",
        )
        for role, name in (
            ("column", "mlp.gate_proj"),
            ("row", "mlp.down_proj"),
            ("shared_row", "mlp.shared_experts.down_proj"),
            ("experts", "mlp.experts"),
            ("expert_width", "mlp.experts"),
            ("replicated", "norm"),
        ):
            assert strategy.shard(role, f"model.layers.0.{name}", 64) is None


def test_a_rank_that_is_its_own_group_holds_its_attention_whole() -> None:
    for rank in range(4):
        for role, name in (
            ("heads", "self_attn"),
            ("heads_row", "self_attn.o_proj"),
            ("vocab", "lm_head"),
        ):
            held = made({"tp": 4, "dp": 4}, rank).shard(role, name, 8)
            assert held is not None and (held.start, held.size, held.reduce, held.gather) == (
                0,
                8,
                False,
                False,
            )


# ---- agreement and routing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modes", "agreed"),
    [
        ([Mode.IDLE, Mode.IDLE], Mode.IDLE),
        ([Mode.IDLE, Mode.DECODE], Mode.DECODE),
        ([Mode.VERIFY, Mode.IDLE], Mode.VERIFY),
        ([Mode.DECODE, Mode.PREFILL], Mode.PREFILL),
        ([Mode.PREFILL, Mode.VERIFY], Mode.PREFILL),
    ],
)
def test_groups_agree_on_the_most_of_everything(modes: list[Mode], agreed: Mode) -> None:
    """Ranks of one group give the same shape, and its load counts once."""
    own = [
        StepShape(modes[0], 3, 40, load=5, pending=600, context=80, free=900, decodes=2),
        StepShape(modes[1], 7, 9, load=2, pending=0, context=16, free=964, decodes=7),
    ]
    found = each(
        {"tp": 4, "dp": 2},
        lambda strategy, rank: (strategy.agree(own[rank // 2]), strategy.router().loads),
    )
    shape = StepShape(
        agreed,
        7,
        40,
        load=7,
        pending=600,
        context=96,
        free=1864,
        decodes=7,
        group_tokens=(40, 9),
        group_decodes=(2, 7),
    )
    assert found == [(shape, [GroupLoad(5, 600, 80, 900), GroupLoad(2, 0, 16, 964)])] * 4


def sequence(id: int) -> Sequence:
    return Sequence(
        id=id,
        prompt=np.array([1], np.int32),
        params=SamplingParams(),
        arrival=0.0,
        stop_ids=frozenset(),
    )


def test_a_request_has_one_group_and_the_least_loaded() -> None:
    routers = [made({"tp": 4, "dp": 2}, rank).router() for rank in range(4)]
    assert [router.group for router in routers] == [0, 0, 1, 1]
    assert [router.leads for router in routers] == [True, False, True, False]
    for router in routers:
        router.loads = [GroupLoad(4), GroupLoad(1)]
    owners = []
    for id in range(8):
        owned = [router.owns(sequence(id)) for router in routers]
        assert owned[0] == owned[1] != owned[2] == owned[3]
        owners.append(0 if owned[0] else 1)
    assert owners == [1, 1, 1, 0, 1, 0, 1, 0]  # up to four each, then in turn


# ---- tokens --------------------------------------------------------------------------------------


def batch_of(tokens: int) -> Batch:
    batch = idle_batch()
    return replace(batch, query_lens=np.array([tokens], np.int32)) if tokens else batch


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_mlps_see_every_groups_tokens_and_groups_get_theirs_back(mesh: dict[str, int]) -> None:
    counts = [3, 0, 7, 5][: mesh["dp"]]
    a_group, most = mesh["tp"] // mesh["dp"], max(counts)
    inputs = [torch.randn(count, 6) for count in counts]

    def work(strategy: DpAttention, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batch_of(counts[rank // a_group])
        batch.agreed = strategy.agree(shape_of(batch))
        shared = strategy.leave_attention(inputs[rank // a_group], batch)
        return shared, strategy.enter_attention(shared * 2, batch)

    for rank, (shared, back) in enumerate(each(mesh, work)):
        assert shared.shape == (mesh["dp"] * most, 6)
        for group, x in enumerate(inputs):
            part = shared[group * most : (group + 1) * most]
            assert torch.equal(part[: len(x)], x) and not part[len(x) :].any()
        assert torch.equal(back, inputs[rank // a_group] * 2)


# ---- refusals ------------------------------------------------------------------------------------


def refusals(
    folder: Path, parallel: list[dict[str, Any]], name: str = "v3", **changes: Any
) -> list[Refusal]:
    config = {
        "model": str(write_config(folder, name, **changes)),
        "weights": {"use": "random"},
        "parallel": parallel,
        "collectives": {"use": "threads"},
    }
    with pytest.raises(PlanRefused) as caught:
        make_plan(
            config, plugins=load_plugins([THREADS], entry_points=False), hardware=read_sheet("cpu")
        )
    return list(caught.value.refusals)


def dp(size: int) -> dict[str, Any]:
    return {"use": "dp_attention", "size": size}


def tensor(size: int) -> dict[str, Any]:
    return {"use": "tensor", "size": size}


@pytest.mark.parametrize(
    ("parallel", "field", "fix"),
    [
        ([dp(2)], "parallel.0.use", "tensor"),
        ([dp(2), tensor(2)], "parallel.1.use", "in the order tensor, dp_attention"),
        ([tensor(1), dp(1)], "parallel.1.size", "more tensor ranks"),
        ([tensor(4), dp(3)], "parallel.1.size", "size = 4 (one of 1, 2, 4)"),
        ([tensor(2), dp(4)], "parallel.1.size", "size = 2"),
    ],
)
def test_groups_that_cannot_be_split_are_refused_with_the_fix(
    tmp_path: Path, parallel: list[dict[str, Any]], field: str, fix: str
) -> None:
    found = refusals(tmp_path, parallel)
    assert len(found) == 1 and found[0].field == field and fix in found[0].fix


def test_heads_must_split_over_a_group(tmp_path: Path) -> None:
    found = refusals(tmp_path, [tensor(4), dp(2)], num_attention_heads=3, num_key_value_heads=3)
    assert (
        len(found) == 1
        and "num_attention_heads of 3" in found[0].reason
        and "2 ranks" in found[0].reason
    )


def test_groups_agree_on_the_largest_drafts() -> None:
    """The tokens of every group count as if it had the largest drafts, also those of prompts."""
    shapes = shorter_shapes(DraftShape.chain(3))
    plan = bare_plan(width=4, draft_shapes=shapes)
    locals_ = [
        StepShape(Mode.DECODE, 3, 3, decodes=3, draft_shape=shapes[0]),
        StepShape(Mode.VERIFY, 2, 4, decodes=2, draft_shape=shapes[1]),
        StepShape(Mode.PREFILL, 2, 12, decodes=1, draft_shape=shapes[2]),
        StepShape(Mode.IDLE, 0, 0),
    ]
    mesh = {"tp": 4, "dp": 4}
    found = each(mesh, lambda one, rank: one.agree(locals_[rank]), plan)
    assert all(shape == found[0] for shape in found)
    assert found[0].mode is Mode.PREFILL and found[0].draft_shape == shapes[2]
    assert found[0].group_tokens == (12, 8, 12, 0) and found[0].tokens == 12
    assert found[0].group_decodes == (3, 2, 1, 0)
    pair = each(mesh, lambda one, rank: one.agree(locals_[rank // 3 * 3]), plan)
    assert pair[0].draft_shape == NO_DRAFTS and pair[0].group_tokens == (3, 3, 3, 0)
    none = each(mesh, lambda one, rank: one.agree(StepShape(Mode.VERIFY, 1, 4, decodes=1)), plan)
    assert none[0].draft_shape is None and none[0].group_tokens == (4, 4, 4, 4)
