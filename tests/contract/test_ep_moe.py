"""Expert parallelism: its shards, its refusals, and each exchange against every expert on one
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.core.errors import Refusal
from glowplug.core.facts.mesh import axis_size, coordinates
from glowplug.core.facts.model_facts import Facts
from glowplug.core.plugin.component import CheckContext, Chosen
from glowplug.core.plugin.decided import Decided
from glowplug.core.plugin.offers import GraphOffers, Mode, ParallelOffers
from glowplug.core.plugin.options import GraphOptions, ParallelOptions
from glowplug.core.protocols import Collectives, ExpertExchange, Quantized, Worker
from glowplug.core.step.batch import Batch, StepShape, idle_batch
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.threads import ThreadOptions
from glowplug.core.testing.harness.threads_runtime import MEETINGS, Meeting, ThreadCollectives
from glowplug.core.testing.suites.parallel import ParallelSuite
from glowplug.kernels.collectives.push import EMPTY_BITS
from glowplug.kernels.formats.fp8 import quantize_tokens
from glowplug.kernels.formats.fp8_block import FP8_INPUT
from glowplug.plugins.parallel import expert_exchange
from glowplug.plugins.parallel.ep_moe import (
    EpMoeOptions,
    check_ep_moe,
    register_parallel_strategies,
)
from glowplug.plugins.parallel.ep_moe_runtime import EpMoe
from tests.support.pushed_rows import Pushing
from tests.support.rank_threads import on_ranks

pytestmark = pytest.mark.usefixtures("quick_switches")
HIDDEN, WIDTH, EXPERTS, TOPK = 12, 8, 8, 3
BACKENDS = ("threads", "gloo")
LAYOUTS: tuple[dict[str, int], ...] = (
    {"tp": 1, "ep": 1},
    {"tp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "dp": 2},
    {"tp": 2, "ep": 1, "dp": 2},
    {"tp": 4, "ep": 2},
    {"tp": 4, "ep": 2, "dp": 2},
    {"tp": 4, "ep": 2, "dp": 4},
    {"tp": 4, "ep": 4},
    {"tp": 4, "ep": 4, "dp": 2},
    {"tp": 4, "ep": 4, "dp": 4},
    {"tp": 4, "ep": 1, "dp": 2},
)
CASES = [
    (mesh, exchange)
    for mesh in LAYOUTS
    for exchange in ("all_gather", "push", "all_to_all", "all_to_all_static")
    if not exchange.startswith("all_to_all") or mesh["ep"] == mesh["tp"]
]


def strategy(rank: int, mesh: Mapping[str, int], collectives: Any = None, **options: Any) -> EpMoe:
    if options.get("exchange") == "push" and collectives is not None:
        collectives = Pushing(collectives, rank, dict(mesh))
    worker = Worker(
        rank=rank, ranks=mesh["tp"], coordinates=coordinates(rank, mesh), collectives=collectives
    )
    return EpMoe(
        EpMoeOptions(size=mesh["ep"], **options), replace(bare_plan(), mesh=dict(mesh)), worker
    )


class TestEpMoeOfTwo(ParallelSuite):
    ranks = 4
    mesh: Mapping[str, int] = {"tp": 4, "ep": 2, "dp": 2}

    def make(self, rank: int) -> EpMoe:
        return strategy(rank, self.mesh)


class TestEpMoeOfAll(TestEpMoeOfTwo):
    mesh = {"tp": 4, "ep": 4}


def test_experts_are_split_over_ep_and_their_width_over_the_rest() -> None:
    held = [strategy(rank, {"tp": 4, "ep": 2}) for rank in range(4)]
    found = [
        (ep.shard("experts", "a.experts", 8), ep.shard("expert_width", "a.experts", 256, 128))
        for ep in held
    ]
    assert [(e.start, e.size, w.start, w.size) for e, w in found if e and w] == [
        (0, 4, 0, 128),
        (0, 4, 128, 128),
        (4, 4, 0, 128),
        (4, 4, 128, 128),
    ]


def test_the_shared_expert_is_the_group_s_own() -> None:
    """The shared expert is split over attn_tp, unevenly too; other MLPs are left to the strategies
    before.
    """
    held = [strategy(rank, {"tp": 4, "ep": 4, "dp": 2}) for rank in range(4)]
    name = "model.layers.1.mlp.shared_experts.down_proj"
    parts = [ep.shard("shared_row", name, 384, 128) for ep in held]
    assert [(p.start, p.size, p.reduce, p.axis) for p in parts if p] == [
        (0, 256, True, "attn_tp"),
        (256, 128, True, "attn_tp"),
    ] * 2
    assert held[0].shard("row", "model.layers.0.mlp.down_proj", 384) is None
    assert held[0].shard("row", name, 384) is None, "the role decides, not the name"
    alone = strategy(0, {"tp": 4, "ep": 4, "dp": 4}).shard("shared_column", name, 384)
    assert alone is not None and (alone.size, alone.gather) == (384, False)


# ---- exchanges against one rank ------------------------------------------------------------------


@dataclass
class Tokens:
    """The tokens of one group's ranks."""

    x: Tensor
    ids: Tensor
    weights: Tensor


class Weights:
    """Experts relu(x A) B, complete or a rank's slice of them."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.a = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) / HIDDEN**0.5
        self.b = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator) / WIDTH**0.5

    def apply(
        self, tokens: Tokens, experts: Sequence[int] = range(EXPERTS), width: slice = slice(None)
    ) -> Tensor:
        a, b = (held[list(experts)] for held in (self.a[:, :, width], self.b[:, width]))
        out = torch.zeros_like(tokens.x)
        for token, chosen in enumerate(tokens.ids.tolist()):
            for place, expert in enumerate(chosen):
                if expert >= 0:
                    y = torch.relu(tokens.x[token] @ a[expert]) @ b[expert]
                    out[token] += y * tokens.weights[token, place]
        return out


def tokens_of(
    count: int, generator: torch.Generator, experts: list[int] | None = None, absent: float = 0.0
) -> Tokens:
    """Return ``count`` tokens, each with TOPK different experts among ``experts``; some ids are
    -1.
    """
    among = torch.tensor(experts or list(range(EXPERTS)))
    picks = (
        torch.stack([torch.randperm(len(among), generator=generator)[:TOPK] for _ in range(count)])
        if count
        else torch.zeros(0, TOPK, dtype=torch.int64)
    )
    ids = among[picks]
    if ids.shape[1] < TOPK:
        ids = F.pad(ids, (0, TOPK - ids.shape[1]), value=-1)
    ids[torch.rand(ids.shape, generator=generator) < absent] = -1
    return Tokens(
        torch.randn(count, HIDDEN, generator=generator),
        ids,
        torch.rand(count, TOPK, generator=generator),
    )


def steps_of(mesh: Mapping[str, int], seed: int) -> list[list[Tokens]]:
    """Return steps of uneven groups: random sizes, no tokens, one token only, all tokens on one
    rank, all experts on the own rank, some ids -1.
    """
    generator = torch.Generator().manual_seed(seed)
    groups, held = mesh.get("dp", 1), EXPERTS // mesh["ep"]
    sizes = [
        [5 + 3 * g for g in range(groups)],
        [0] * groups,
        [int(g == 0) for g in range(groups)],
        [int(g == groups - 1) * 7 for g in range(groups)],
    ]
    sizes += [torch.randint(0, 18, (groups,), generator=generator).tolist() for _ in range(3)]
    steps = [[tokens_of(count, generator) for count in step] for step in sizes]
    steps.append([tokens_of(4 + g, generator, list(range(held))) for g in range(groups)])
    home = [g * axis_size("attn_tp", mesh) // axis_size("moe_tp", mesh) for g in range(groups)]
    steps.append([tokens_of(6, generator, list(range(held * at, held * (at + 1)))) for at in home])
    steps.append([tokens_of(9, generator, absent=0.4) for _ in range(groups)])
    return steps


def batch_of(step: list[Tokens]) -> Batch:
    """Return a batch with only the fields that exchanges read."""
    sizes = [len(tokens.x) for tokens in step]
    return replace(idle_batch(), agreed=StepShape(Mode.DECODE, max(sizes), max(sizes), len(sizes)))


def exchanged(
    exchange: ExpertExchange,
    held: EpMoe,
    weights: Weights,
    tokens: Tokens,
    batch: Batch,
    partial: Tensor | None = None,
) -> Tensor:
    """Run an exchange as a mixture does, and return the result."""
    experts, width = held.shard("experts", "m", EXPERTS), held.shard("expert_width", "m", WIDTH)
    assert experts is not None and width is not None
    numbers = held.held_experts("m", EXPERTS)
    if numbers is None:
        numbers = range(experts.start, experts.start + experts.size)
    sent = Tokens(
        *exchange.dispatch(tokens.x.clone(), tokens.ids.clone(), tokens.weights.clone(), batch)
    )
    assert sent.x.shape[0] == sent.ids.shape[0] == sent.weights.shape[0] and bool(
        (sent.ids < len(numbers)).all()
    )
    y = weights.apply(
        sent,
        numbers,
        slice(width.start, width.start + width.size),
    )
    return exchange.combine(y, partial)


def run_steps(
    backend: str,
    mesh: Mapping[str, int],
    exchange: str,
    steps: list[list[Tokens]],
    weights: Weights,
    partials: Callable[[int, Tokens], Tensor | None] = lambda rank, tokens: None,
    **options: Any,
) -> list[tuple[list[Tensor], Tensor | None]]:
    """Run all steps, and return by rank the results of each step and the load."""

    def body(collectives: Collectives, rank: int) -> tuple[list[Tensor], Tensor | None]:
        held = strategy(rank, mesh, collectives, exchange=exchange, **options)
        moved = held.expert_exchange("m", EXPERTS)
        assert moved is not None
        group = coordinates(rank, mesh)["dp"]
        made = [
            exchanged(
                moved, held, weights, step[group], batch_of(step), partials(rank, step[group])
            )
            for step in steps
        ]
        return made, moved.load

    return on_ranks(mesh, backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("mesh", "exchange"),
    CASES,
    ids=lambda value: (
        value
        if isinstance(value, str)
        else "-".join(f"{axis}{size}" for axis, size in value.items())
    ),
)
def test_tokens_come_back_as_one_rank_computes_them(
    mesh: dict[str, int], exchange: str, backend: str
) -> None:
    weights, steps = Weights(1), steps_of(mesh, seed=mesh["tp"] * 10 + mesh["ep"])
    found = run_steps(backend, mesh, exchange, steps, weights)
    for rank, (made, _) in enumerate(found):
        group = coordinates(rank, mesh)["dp"]
        for step, got in zip(steps, made, strict=True):
            torch.testing.assert_close(got, weights.apply(step[group]), atol=1e-5, rtol=1e-5)
    chosen = torch.cat([tokens.ids.flatten() for step in steps for tokens in step])
    counted = sum(load for _, load in found if load is not None)
    assert torch.equal(counted, torch.bincount(chosen[chosen >= 0], minlength=EXPERTS))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("mesh", "exchange"),
    [
        ({"tp": 4, "ep": 4, "dp": 2}, name)
        for name in ("all_gather", "push", "all_to_all", "all_to_all_static")
    ]
    + [({"tp": 4, "ep": 2}, "all_gather"), ({"tp": 4, "ep": 4}, "all_to_all")]
    + [({"tp": 4, "ep": 2, "dp": groups}, "push") for groups in (2, 4)],
)
def test_a_partial_sum_is_added_up_over_the_group(
    mesh: dict[str, int], exchange: str, backend: str
) -> None:
    """Each rank of a group adds its own term of the shared expert."""
    weights, steps = Weights(2), steps_of(mesh, seed=3)

    def term(rank: int, tokens: Tokens) -> Tensor:
        return (coordinates(rank, mesh)["attn_tp"] + 1) * tokens.x

    total = sum(range(1, axis_size("attn_tp", mesh) + 1))
    for rank, (made, _) in enumerate(run_steps(backend, mesh, exchange, steps, weights, term)):
        group = coordinates(rank, mesh)["dp"]
        for step, got in zip(steps, made, strict=True):
            want = weights.apply(step[group]) + total * step[group].x
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "exchange"), [(mesh, name) for mesh, name in CASES if mesh.get("dp", 1) > 1]
)
def test_padding_never_leaks(
    mesh: dict[str, int], exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding of the exchange and tokens of a padded batch (ids -1) are NaN; real tokens are
    not affected.
    """
    pad = F.pad

    def poisoned(x: Tensor, fill: tuple[int, ...], value: float = 0.0) -> Tensor:
        return pad(x, fill, value=float("nan") if x.is_floating_point() else value)

    weights, steps = Weights(3), steps_of(mesh, seed=5)
    for step in steps:
        for tokens in step:
            tokens.x = torch.cat([tokens.x, torch.full((2, HIDDEN), float("nan"))])
            tokens.ids = torch.cat([tokens.ids, torch.full((2, TOPK), -1)])
            tokens.weights = torch.cat([tokens.weights, torch.full((2, TOPK), float("nan"))])
    monkeypatch.setattr(expert_exchange.F, "pad", poisoned)
    found = run_steps("threads", mesh, exchange, steps, weights)
    monkeypatch.undo()
    for rank, (made, load) in enumerate(found):
        group = coordinates(rank, mesh)["dp"]
        for step, got in zip(steps, made, strict=True):
            real = len(step[group].x) - 2
            torch.testing.assert_close(
                got[:real], weights.apply(step[group])[:real], atol=1e-5, rtol=1e-5
            )
        assert load is not None
    chosen = torch.cat([tokens.ids.flatten() for step in steps for tokens in step])
    counted = sum(load for _, load in found if load is not None)
    assert torch.equal(counted, torch.bincount(chosen[chosen >= 0], minlength=EXPERTS))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("mesh", "exchange"), [(mesh, name) for mesh, name in CASES if mesh["tp"] == 4]
)
def test_a_token_s_bits_do_not_depend_on_its_neighbours(
    mesh: dict[str, int], exchange: str, backend: str
) -> None:
    """One token gives the same bits alone, between others, and last of many, with a term of
    each rank.
    """
    generator = torch.Generator().manual_seed(6)
    weights, probe, groups = Weights(4), tokens_of(1, generator, [0, 2, 7]), mesh.get("dp", 1)
    places, steps = (0, 3, 16), []
    for place in places:
        step = [tokens_of(place + 1 + g % 2 * 4, generator) for g in range(groups)]
        step[-1].x[place], step[-1].ids[place], step[-1].weights[place] = (
            probe.x[0],
            probe.ids[0],
            probe.weights[0],
        )
        steps.append(step)

    def term(rank: int, tokens: Tokens) -> Tensor | None:
        return tokens.x / (3 + coordinates(rank, mesh)["attn_tp"]) if groups < 4 else None

    made = run_steps(backend, mesh, exchange, steps, weights, term)[-1][0]
    alone = made[0][0]
    assert all(torch.equal(got[place], alone) for got, place in zip(made, places, strict=True))


@pytest.mark.parametrize(("mesh", "exchange"), CASES)
def test_every_choice_is_worked_on_by_the_ranks_that_share_the_expert(
    mesh: dict[str, int], exchange: str
) -> None:
    """No other rank works on it, and padding chooses no expert."""
    step = tokens_of(5, torch.Generator().manual_seed(8))
    steps = [step] + [tokens_of(2, torch.Generator())] * (mesh.get("dp", 1) - 1)

    def body(collectives: Collectives, rank: int) -> int:
        moved = strategy(rank, mesh, collectives, exchange=exchange).expert_exchange("m", EXPERTS)
        own = steps[coordinates(rank, mesh)["dp"]]
        assert moved is not None
        return int((moved.dispatch(own.x, own.ids, own.weights, batch_of(steps))[1] >= 0).sum())

    chosen = sum(tokens.ids.numel() for tokens in steps)
    assert sum(on_ranks(mesh, "threads", body)) == chosen * axis_size("moe_tp", mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_travel_whole(dtype: torch.dtype) -> None:
    x, ids, weights = (
        torch.randn(3, 5, 6).to(dtype),
        torch.randint(-1, 9, (3, 5, TOPK)),
        torch.rand(3, 5, TOPK),
    )
    for given, got in zip(
        (x, ids, weights),
        expert_exchange.unpack(expert_exchange.pack(x, ids, weights).flatten(0, 1), TOPK, dtype),
        strict=True,
    ):
        assert torch.equal(given.flatten(0, 1), got)


@pytest.mark.parametrize("hidden", [6, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_bytes_are_numbers_of_which_only_pairs_of_negative_zeros_are_marks(
    dtype: torch.dtype, hidden: int
) -> None:
    x = torch.full((3, hidden), -0.0).to(dtype)
    x[0, ::2] = 1.0
    ids = torch.tensor([[-1, 0, 255]] * 3)
    packed = expert_exchange.pack(x, ids, torch.tensor([[-0.0, 1.0, 1e-40]] * 3))
    sent = expert_exchange.as_numbers(packed)
    assert torch.equal(sent.view(torch.uint8), packed)
    if sent.dtype == torch.float32:
        marks = sent.view(torch.int32) == EMPTY_BITS
        assert not marks[:, : 2 * TOPK].any() and not marks[0].any()
        assert marks.any() == (dtype == torch.bfloat16)
    else:
        assert packed.shape[1] % 4


def test_partial_results_add_up_in_float32() -> None:
    """Sixteen ranks' terms of 2^-8 beside 1: bfloat16 would lose each of them."""
    parts = torch.full((17, 1, 4), 2.0**-9, dtype=torch.bfloat16)
    parts[0] = 1
    assert torch.equal(expert_exchange.add_up(parts), torch.full((1, 4), 1 + 16 * 2.0**-9))


def test_loads_are_not_counted_when_switched_off() -> None:
    collectives = (
        ThreadCollectives(ThreadOptions(), bare_plan(), Worker(rendezvous="alone"))
        if MEETINGS.setdefault("alone", Meeting())
        else None
    )
    moved = strategy(0, {"tp": 1, "ep": 1}, collectives, count_load=False).expert_exchange(
        "m", EXPERTS
    )
    del MEETINGS["alone"]
    assert moved is not None and moved.load is None


def test_more_tokens_than_agreed_is_a_fault() -> None:
    moved = strategy(0, {"tp": 2, "ep": 2, "dp": 2}, object()).expert_exchange("m", EXPERTS)
    assert moved is not None
    tokens = tokens_of(3, torch.Generator())
    batch = replace(idle_batch(), agreed=StepShape(Mode.DECODE, 2, 2))
    with pytest.raises(AssertionError, match="3 tokens in a step agreed to have 2"):
        moved.dispatch(tokens.x, tokens.ids, tokens.weights, batch)


# ---- refusals ------------------------------------------------------------------------------------

TENSOR = Chosen(
    "tensor", ParallelOptions(use="tensor"), ParallelOffers(axes=frozenset({"tp"}), ranks=True)
)


def refusals(
    tp: int = 4,
    experts: int = 8,
    before: tuple[Chosen, ...] = (TENSOR,),
    after: tuple[Chosen, ...] = (),
    captures: frozenset[Mode] = frozenset(),
    draft: int | None = None,
    **options: Any,
) -> list[Refusal]:
    facts: Facts = bare_plan().facts
    model = replace(facts.model, n_routed_experts=experts)
    own = EpMoeOptions(**options)
    chosen = Chosen("ep_moe", own, register_parallel_strategies()[0].offers)
    runner = Chosen("some_graphs", GraphOptions(use="some_graphs"), GraphOffers(captures=captures))
    return list(
        check_ep_moe(
            CheckContext(
                options=own,
                config=None,  # type: ignore[arg-type]
                facts=replace(
                    facts,
                    model=model,
                    draft=None if draft is None else replace(model, n_routed_experts=draft),
                ),
                chosen={"parallel": (*before, chosen, *after), "graphs": (runner,)},
                values=Decided(mesh={"tp": tp}),
            )
        )
    )


@pytest.mark.parametrize(
    "options",
    [
        {"size": 1},
        {"size": 2},
        {"size": 4},
        {"size": 4, "exchange": "all_to_all_static"},
        {"size": 4, "exchange": "all_to_all"},
        {"size": 2, "exchange": "all_gather"},
    ],
)
def test_meshes_that_fit_are_accepted(options: dict[str, Any]) -> None:
    assert refusals(**options) == []
    if options.get("exchange") != "all_to_all":
        assert refusals(captures=frozenset({Mode.DECODE}), **options) == []


@pytest.mark.parametrize(
    ("given", "field", "reason", "fix"),
    [
        ({"size": 2, "experts": 0}, "use", "Fake has no routed experts", "leave ep_moe out"),
        (
            {"size": 2, "before": ()},
            "use",
            "none is listed before it",
            'use = "tensor", size = 2 before it',
        ),
        (
            {"size": 2, "before": (), "after": (TENSOR,)},
            "use",
            "none is listed before it",
            "before it",
        ),
        (
            {"size": 4, "experts": 6},
            "size",
            "6 experts cannot be divided evenly among 4 ranks",
            "size = 1 or 2",
        ),
        (
            {"size": 3, "experts": 9},
            "size",
            "3 does not divide the 4 tensor-parallel ranks",
            "size = 1",
        ),
        ({"size": 4, "draft": 6}, "size", "6 experts cannot", "size = 1 or 2"),
        (
            {"size": 2, "exchange": "all_to_all"},
            "exchange",
            "2 ranks split the width of each",
            'size = 4, or parallel.1.exchange = "all_gather"',
        ),
        (
            {"size": 2, "exchange": "all_to_all_static", "experts": 6},
            "exchange",
            "each expert whole on one rank",
            'parallel.1.exchange = "all_gather"',
        ),
        (
            {"size": 4, "exchange": "all_to_all", "captures": frozenset({Mode.DECODE})},
            "exchange",
            "which some_graphs cannot capture",
            'exchange = "all_to_all_static", or graphs.use = "eager"',
        ),
    ],
)
def test_meshes_that_do_not_fit_are_refused_with_the_fix(
    given: dict[str, Any], field: str, reason: str, fix: str
) -> None:
    found = refusals(**given)
    assert len(found) == 1, found
    assert found[0].field == f"parallel.{len(given.get('before', (TENSOR,)))}.{field}"
    assert reason in found[0].reason and fix in found[0].fix


@pytest.mark.parametrize("exchange", ["all_gather", "push"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "mesh", [{"tp": 2, "ep": 2, "dp": 2}, {"tp": 4, "ep": 2, "dp": 2}, {"tp": 4, "ep": 4, "dp": 4}]
)
def test_tokens_are_sent_as_the_values_that_experts_would_quantise(
    mesh: dict[str, int], backend: str, exchange: str
) -> None:
    """Every group has another number of tokens; steps beyond the rows of ``push`` are gathered."""
    hidden = 320  # the last group of channels is shorter

    def body(collectives: Collectives, rank: int) -> tuple[int, int]:
        rows: list[int] = []

        class Recorded:
            def __getattr__(self, name: str) -> Any:
                return getattr(collectives, name)

            def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
                rows.append(x[0].numel() * x.element_size())
                return collectives.all_gather(x, axis, dim)

        held = strategy(rank, mesh, Recorded(), exchange=exchange)
        moved: Any = held.expert_exchange("m", EXPERTS)
        group = coordinates(rank, mesh)["dp"]
        generator = torch.Generator().manual_seed(group)
        most = 1200 if exchange == "push" else 520
        tokens = most - 7 * group
        x = torch.randn(tokens, hidden, generator=generator).bfloat16()
        ids = torch.randint(-1, EXPERTS, (tokens, TOPK), generator=generator)
        weights = torch.rand(tokens, TOPK, generator=generator)
        batch = replace(
            idle_batch(), agreed=StepShape(Mode.DECODE, most, most, mesh["dp"], decodes=most)
        )
        assert moved.sends_quantized(FP8_INPUT, batch)
        assert not moved.sends_quantized("plain", batch)
        if exchange != "push":
            small = replace(batch.agreed, tokens=expert_exchange.FP8_ROWS_TOKENS - 1)
            assert not moved.sends_quantized(FP8_INPUT, replace(batch, agreed=small))
        plain, local, kept = moved.dispatch(x, ids.clone(), weights, batch)
        cast = Quantized(*quantize_tokens(x))
        sent, sent_local, sent_kept = moved.dispatch_quantized(cast, ids.clone(), weights, batch)
        assert torch.equal(sent_local, local) and torch.equal(sent_kept, kept)
        chosen = (local >= 0).any(-1)
        assert chosen.any()
        values, scales = quantize_tokens(plain[chosen])
        assert torch.equal(sent.values[chosen].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(sent.scales[chosen], scales)
        assert sent.scales.stride(0) == 1, "scales lie by column"
        return rows[0], rows[1]

    for plain, quantised in on_ranks(mesh, backend, body):
        assert plain == 8 * TOPK + 2 * hidden
        assert quantised == 8 * TOPK + hidden + 4 * 3
