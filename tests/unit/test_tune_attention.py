"""``glowplug tune attention``: the search, the tables, and how backends and ``auto`` use them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug.core.errors import PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import Worker
from glowplug.core.protocols.tuning import LayerShapes, TuneTable
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.plugins.attention import tuners
from glowplug.plugins.attention.shared.attention_tables import (
    AttentionProblem,
    StepTables,
    measured,
    problem_of,
)
from glowplug.plugins.attention.tuning.search import search
from tests.support.source_tree import ROOT
from tests.support.tables import forget
from tests.support.tiny import write_config

SHAPES = LayerShapes((), (), frozenset(), 0)
H200 = replace(read_sheet("1xh200"), packages=None)
PACKAGES = {"triton": "3.6.0", "sglang-kernel": "0.4.2.post2", "flashinfer-python": "0.6.11"}


# ---- the search ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    x: int
    y: int


def axis(name: str, most: int) -> Callable[[Point], Iterator[Point]]:
    def others(at: Point) -> Iterator[Point]:
        for value in range(most):
            if value != getattr(at, name):
                yield replace(at, **{name: value})

    return others


class Cost:
    """Times of points by a formula; each measured point is noted."""

    def __init__(self, formula: Callable[[Point], float | None]) -> None:
        self.formula = formula
        self.seen: list[Point] = []

    def __call__(self, at: Point) -> float | None:
        self.seen.append(at)
        return self.formula(at)


AXES = [axis("x", 6), axis("y", 6)]


def test_the_search_follows_constants_that_depend_on_each_other() -> None:
    cost = Cost(lambda at: 10.0 + (at.x - at.y) ** 2 + (at.y - 4) ** 2)
    best, time = search(Point(0, 0), AXES, cost, lambda: False)
    assert (best, time) == (Point(3, 3), 11.0) or (best, time) == (Point(4, 4), 10.0)
    assert len(cost.seen) == len(set(cost.seen)), "no point is measured twice"
    assert len(cost.seen) < 36


def test_points_that_do_not_run_and_noise_are_passed_over() -> None:
    cost = Cost(lambda at: None if at.x == 5 else 100.0 - 0.1 * at.x - 20 * (at.y == 2))
    best, time = search(Point(1, 0), AXES, cost, lambda: False)
    assert best == Point(1, 2) and time == 79.9, "half a percent faster is noise"
    nothing = search(Point(0, 0), AXES, Cost(lambda at: None), lambda: False)
    assert nothing == (Point(0, 0), float("inf"))


def test_the_search_ends_when_time_is_up() -> None:
    cost = Cost(lambda at: 10.0 - at.x)
    best, _ = search(Point(0, 0), AXES, cost, lambda: len(cost.seen) >= 3)
    assert len(cost.seen) == 3 and best == Point(2, 0)


# ---- the tuner -----------------------------------------------------------------------------------


@pytest.fixture
def own(own_tables: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tables of short rows, and few alternatives: Triton's interpreter is slow."""
    tuning = "glowplug.plugins.attention.tuning"
    monkeypatch.setattr(f"{tuning}.tuner.CONTEXTS", (16, 48))
    for name, values in (("STAGES", (3, 4)), ("WARPS", (4,)), ("KEYS", (16, 32))):
        monkeypatch.setattr(f"{tuning}.tilings.{name}", values)
    return own_tables


def cpu_plan(folder: Path, kind: str = "llama", **config: Any) -> EnginePlan:
    return make_plan(
        {
            "model": str(write_config(folder, kind)),
            "skip_tokenizer": True,
            "device": "cpu",
            "dtype": "float32",
            "weights": {"use": "random"},
            **config,
        },
        plugins=load_plugins(("tests.plugins.interpreted_mha",), entry_points=False),
    )


class Timer:
    """A timer whose times come from the tiling of the newest call; it runs no call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float:
        self.calls += 1
        backend: Any = (
            calls[0].__closure__
            and next(
                cell.cell_contents
                for cell in calls[0].__closure__
                if hasattr(cell.cell_contents, "__self__")
            ).__self__
        )
        tile = getattr(backend, "tile", None)
        if tile is None:
            return 50.0
        return 20.0 + abs(tile.splits - 2) + (tile.block_n != 32) + abs(tile.stages - 4)


def tuner_of(plan: EnginePlan, timer: Any) -> Any:
    pytest.importorskip("triton")
    from glowplug.plugins.attention.tuning.tuner import AttentionTuner

    plugins = load_plugins(("tests.plugins.interpreted_mha",), entry_points=False)
    return AttentionTuner(plan, Worker(dtype=torch.float32), timer, plugins)


def test_tables_fill_with_the_fastest_tiling_and_the_next_run_goes_on(
    own: Path, tmp_path: Path
) -> None:
    plan, timer, log = cpu_plan(tmp_path), Timer(), list[str]()
    tuner = tuner_of(plan, timer)
    tables: list[TuneTable] = tuner.tables(SHAPES, (1, 3))
    assert [table.label for table in tables] == [
        "attention=mha,H=4,K=2,D=16,W=1,context=16",
        "attention=mha,H=4,K=2,D=16,W=1,context=48",
    ]
    table = tables[1]
    tuner.tune(table, 600.0, log.append)
    found = json.loads(table.path.read_text())
    assert table.path.parent == own and list(found) == ["1", "3"]
    for one in found.values():
        assert one["us"] == {"torch_mha": 50.0, "interpreted_mha": 20.0}
        tiling = one["tiling"]
        assert (tiling["splits"], tiling["block_n"], tiling["stages"]) == (2, 32, 4)
    assert "fa3_mha is not measured: it runs on cuda" in log
    assert not [line for line in log if line.startswith("hopper_mha")], "it chooses among others"
    forget()
    assert [one.missing for one in tuner.tables(SHAPES, (1, 3, 8))] == [(1, 3, 8), (8,)]
    late: list[str] = []
    tuner.tune(replace(table, rows=(8,)), -1.0, late.append)
    assert late[-1] == "out of time before measuring 8 rows"
    assert list(json.loads(table.path.read_text())) == ["1", "3"]


def test_a_tiling_with_another_result_is_passed_over(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = tuner_of(cpu_plan(tmp_path), Timer())
    monkeypatch.setattr(
        "glowplug.plugins.attention.tuning.tuner._agrees", lambda found, wanted: False
    )
    table = tuner.tables(SHAPES, (1,))[1]
    tuner.tune(table, 600.0, lambda line: None)
    by_rule = json.loads(table.path.read_text())["1"]
    assert by_rule["us"]["interpreted_mha"] > 20.0


def test_the_step_that_is_timed_gives_the_reference_result(own: Path, tmp_path: Path) -> None:
    """Backends of both kinds compute the same from the same caches."""
    pytest.importorskip("triton")
    from glowplug.plugins.attention.tuning.decode_call import DecodeCalls, DecodeStep

    plan = cpu_plan(tmp_path)
    problem = problem_of(plan.facts.model, plan.mesh, "float32", "float32", 1)
    tuner = tuner_of(plan, Timer())
    step = DecodeStep(problem, 3, 20)
    results = []
    for name in ("torch_mha", "interpreted_mha"):
        build = partial(tuner._build, tuner._plugins.find("attention", name).component)
        results.append(DecodeCalls(build, plan, step, tuner._worker).result())
    assert results[0].any() and torch.allclose(*results, rtol=1e-4, atol=1e-5)
    tuner = tuner_of(cpu_plan(tmp_path / "v3", "v3"), lambda calls: (calls[0](), 3.0)[1])
    table = tuner.tables(SHAPES, (2,))[0]
    assert table.label.startswith("attention=mla,H=4,K=1,D=")
    lines: list[str] = []
    tuner.tune(table, 60.0, lines.append)
    assert lines[-1].startswith("2 rows: torch_mla 3.0 us"), lines


def test_our_backend_reads_its_tiling_from_the_table(own: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from glowplug.kernels.mha.decode import MhaTiling
    from glowplug.plugins.attention.tuning.decode_call import DecodeCalls, DecodeStep

    plan = cpu_plan(tmp_path)
    problem = problem_of(plan.facts.model, plan.mesh, "float32", "float32", 1)
    tuner = tuner_of(plan, Timer())
    component = tuner._plugins.find("attention", "interpreted_mha").component

    def used() -> tuple[MhaTiling, torch.Tensor]:
        calls = DecodeCalls(
            lambda made: tuner._build(component, made),
            plan,
            DecodeStep(problem, 2, 48),
            tuner._worker,
        )
        result = calls.result()
        return calls.backend.used, result  # type: ignore[attr-defined]

    rule, wanted = used()
    other = replace(rule, splits=1 + rule.splits % 2, block_n=32)
    tuned.keep(
        own / problem.table_name(48), {2: {"us": {"interpreted_mha": 1.0}, "tiling": asdict(other)}}
    )
    forget()
    found, result = used()
    assert found == other != rule
    assert torch.allclose(result, wanted, rtol=1e-4, atol=1e-5)
    tuned.keep(own / problem.table_name(48), {2: {"us": {}, "tiling": {"no_such": 1}}})
    forget()
    assert used()[0] == rule, "a malformed tiling is ignored"


# ---- what reads the tables -----------------------------------------------------------------------


MHA = AttentionProblem("mha", 32, 8, 128, 1, "bfloat16", "bfloat16")
CARD = ("NVIDIA H200", "3.6.0")


def put(folder: Path, context: int, us: dict[int, dict[str, float]], **more: Any) -> None:
    table = {rows: {"us": times, **more} for rows, times in us.items()}
    tuned.keep(folder / MHA.table_name(context, CARD), table)
    forget()


def test_the_nearest_measured_length_and_rows_decide(own_tables: Path) -> None:
    put(own_tables, 1024, {1: {"a": 1.0}, 8: {"a": 2.0}})
    put(own_tables, 16384, {4: {"a": 3.0}})
    found = {
        (rows, longest): (measured(MHA, rows, longest, CARD) or {}).get("us", {}).get("a")
        for rows in (1, 5, 16, 17)
        for longest in (100, 4000, 4200, 100000)
    }
    assert {key: value for key, value in found.items() if key[1] < 4096} == {
        (1, 100): 1.0,
        (1, 4000): 1.0,
        (5, 100): 2.0,
        (5, 4000): 2.0,
        (16, 100): 2.0,
        (16, 4000): 2.0,
        (17, 100): None,
        (17, 4000): None,
    }
    assert found[5, 4200] == found[1, 100000] == 3.0 and found[16, 100000] is None
    assert measured(replace(MHA, heads=16), 1, 1024, CARD) is None
    assert measured(MHA, 1, 1024, ("NVIDIA H100", "3.6.0")) is None
    assert measured(MHA, 1, 1024, ("NVIDIA H200", "3.7.0")) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        write_config(
            tmp_path_factory.mktemp("llama"),
            "llama",
            hidden_size=4096,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=8192,
        )
    )


def gpu_plan(model: str, hardware: HardwareFacts = H200, **config: Any) -> EnginePlan:
    plugins = load_plugins(entry_points=False)
    packages = {**plugins.software.packages, **PACKAGES}
    plugins.__dict__["software"] = replace(plugins.software, packages=packages)
    given = {"model": model, "skip_tokenizer": True, "weights": {"use": "random"}, **config}
    return make_plan({"dtype": "bfloat16", **given}, plugins=plugins, hardware=hardware)


def test_auto_takes_the_backend_measured_fastest(own_tables: Path, model: str) -> None:
    assert gpu_plan(model).choice("attention").name == "hopper_mha"
    put(own_tables, 4096, {1: {"triton_mha": 9.0, "fa3_mha": 8.0}, 8: {"triton_mha": 20.0}})
    assert gpu_plan(model).choice("attention").name == "hopper_mha", "8 rows lack a backend"
    put(
        own_tables,
        4096,
        {1: {"triton_mha": 9.0, "fa3_mha": 8.0}, 8: {"triton_mha": 10.0, "fa3_mha": 12.0}},
    )
    plan = gpu_plan(model)
    assert plan.choice("attention").name == "hopper_mha", "it has the faster of both at each row"
    note = next(one for one in plan.decisions if one.field == tuners.FIELD)
    assert note.why == "fastest on NVIDIA H200: fa3_mha at 1 rows; triton_mha at 8 rows"
    tables = StepTables(plan)
    names = ("triton_mha", "fa3_mha")
    assert tables.fastest(names, 1, 1, 4096) is None, "this machine's card has no table"


def test_each_card_has_its_own_choice(own_tables: Path) -> None:
    """A backend that is faster than those among which ``hopper_mla`` chooses is taken."""
    lite = str(ROOT / "models" / "shapes" / "deepseek-v2-lite.json")
    problem = AttentionProblem("mla", 16, 1, 576, 1, "bfloat16", "bfloat16")
    times = {"triton_mla": 9.0, "flashmla": 8.0, "fa3_mla": 7.0, "flashinfer_mla": 10.0}
    h100 = replace(H200, devices=(replace(H200.devices[0], name="NVIDIA H100"),))
    for card, us in (("NVIDIA H200", times), ("NVIDIA H100", {**times, "flashmla": 6.0})):
        tuned.keep(own_tables / problem.table_name(4096, (card, "3.6.0")), {8: {"us": us}})
    forget()
    assert gpu_plan(lite).choice("attention").name == "fa3_mla"
    plan = gpu_plan(lite, hardware=h100)
    assert plan.choice("attention").name == "hopper_mla"
    note = next(one for one in plan.decisions if one.field == "kernels.decode_attention")
    assert note.why == "fastest as measured on NVIDIA H100: flashmla at 8 rows"
    given = gpu_plan(lite, attention={"use": "flashmla"})
    assert given.choice("attention").name == "flashmla", "the operator's choice stands"
    h20 = replace(H200, devices=(replace(H200.devices[0], name="NVIDIA H20"),))
    assert gpu_plan(lite, hardware=h20).choice("attention").name == "hopper_mla"


def test_the_plan_names_other_versions(own_tables: Path, model: str) -> None:
    put(own_tables, 4096, {1: {"fa3_mha": 8.0}}, versions={"sglang-kernel": "0.4.1"})
    note = next(one for one in gpu_plan(model).decisions if one.field == tuners.FIELD)
    assert "measured with sglang-kernel 0.4.1 (here 0.4.2.post2)" in note.why
    assert "glowplug tune attention" in note.why


def test_a_layout_that_does_not_divide_is_refused_not_looked_up(
    own_tables: Path, model: str
) -> None:
    put(own_tables, 4096, {1: {"fa3_mha": 8.0}})
    eight = replace(H200, devices=H200.devices * 8)
    parallel = [{"use": "tensor", "size": 8}, {"use": "dp_attention", "size": 3}]
    with pytest.raises(PlanRefused, match="cannot be divided evenly among 3 groups"):
        gpu_plan(model, hardware=eight, parallel=parallel)
