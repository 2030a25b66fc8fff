"""The KV pool is sized from the memory measured as free. Readings are invented here; a GPU test
takes real ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug.core.engine.engine import Engine
from glowplug.core.errors import GlowplugError
from glowplug.core.plan.plan import BudgetLine, EnginePlan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols import Worker
from glowplug.core.startup import memory_fit
from glowplug.core.startup.build_rank import build_rank
from glowplug.core.startup.memory_gauge import HostGauge, MemoryMeter
from glowplug.core.startup.page_fit import MeasuredMemory, compared, differences, pages_that_fit
from glowplug.core.startup.phases import rate
from glowplug.core.step.messages import Control
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.ranks import rank_plan
from tests.support.slow_cases import some_slow_rows
from tests.support.tiny import write_config

GIB = 1 << 30


def plan_of(memory: dict[str, Any] | None = None, **sizes: Any) -> EnginePlan:
    budget = (BudgetLine("weights", 10 * GIB, ""), BudgetLine("activations", GIB, ""))
    plan = bare_plan(num_pages=100, page_size=16, **{"least_pages": 5, "most_pages": 1000, **sizes})
    return replace(plan, budget=budget, config={"memory": memory or {}})


def test_pages_fill_the_memory_left_by_weights_steps_and_graphs() -> None:
    measured = MeasuredMemory(total=100 * GIB, free=40 * GIB, step=3 * GIB, graphs=GIB)
    assert measured.for_cache(None, 0) == int(100 * GIB * 0.98) - (60 + 3 + 1) * GIB
    assert measured.for_cache(0.9, GIB) == int(100 * GIB * 0.9) - (60 + 3 + 1 + 1) * GIB
    assert pages_that_fit(plan_of(), measured, GIB, {}) == 34
    assert pages_that_fit(plan_of({"fraction": 0.9}), measured, GIB, {}) == 26
    assert (
        pages_that_fit(plan_of({"fraction": 0.9, "reserve_bytes": 4 * GIB}), measured, GIB, {})
        == 22
    )


def test_pages_stay_between_the_useful_and_the_required_number() -> None:
    measured = MeasuredMemory(total=100 * GIB, free=90 * GIB, step=0)
    assert pages_that_fit(plan_of(most_pages=20), measured, GIB, {}) == 20
    asked = plan_of(least_pages=0, most_pages=0)  # a fixed number of tokens
    assert pages_that_fit(asked, measured, GIB // 2, {}) == asked.sizes.num_pages
    with pytest.raises(
        GlowplugError,
        match="88.0 GiB of 100.0 GiB are left for the KV cache, which needs 100.0 GiB",
    ):
        pages_that_fit(asked, measured, GIB, {})


def test_too_little_memory_is_reported_with_names_and_numbers() -> None:
    measured = MeasuredMemory(total=20 * GIB, free=4 * GIB, step=2 * GIB, graphs=GIB // 2)
    with pytest.raises(GlowplugError) as error:
        pages_that_fit(plan_of(), measured, GIB, {"weights": 12 * GIB, "graphs": 7})
    for part in (
        "1.1 GiB of 20.0 GiB are left",
        "needs 5.0 GiB for 64 tokens",
        "weights 12.0 GiB (10.0 GiB planned)",
        "graphs 7 B",
        "a step takes 2.0 GiB",
        "context_length or memory.kv_tokens = 1 or less",
    ):
        assert part in str(error.value), error.value
    assert compared(plan_of(), {}) == ""


class Pretend(HostGauge):
    """A device that always has ``free`` bytes left. Each step claims and holds a little more for a
    while.

    Attributes:
        temporary: Bytes that the most expensive step allocates and frees.
    """

    measures = True

    def __init__(self, total: int, free: int, temporary: int) -> None:
        self.total, self.left, self.temporary = total, free, temporary
        self.settled = 0

    def held(self) -> int:
        return 1000

    def most(self) -> int:
        return 1000 + self.temporary

    def claimed(self) -> int:
        return 2000

    def most_claimed(self) -> int:
        return 2000 + self.temporary

    def settle(self) -> None:
        self.settled += 1

    def device(self) -> tuple[int, int]:
        return self.left, self.total


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def started(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    plugins: PluginSet,
    gauge: Pretend,
    notes: list[str],
    expandable_segments: bool = False,
    **config: Any,
) -> tuple[EnginePlan, Engine]:
    """Start an engine on the CPU whose memory is measured by ``gauge``; its plan allows ten pages
    more or fewer.
    """
    plan = rank_plan(
        {
            "model": str(write_config(folder, "v3", num_nextn_predict_layers=1)),
            "device": "cpu",
            "weights": {"use": "random"},
            "skip_tokenizer": True,
            "memory": {"kv_tokens": 512},
            "scheduler": {"max_running_requests": 3, "chunk_size": 24},
            **config,
        },
        plugins,
    )
    plan = replace(
        plan,
        expandable_segments=expandable_segments,
        sizes=replace(
            plan.sizes, least_pages=plan.sizes.num_pages - 10, most_pages=plan.sizes.num_pages + 10
        ),
    )
    monkeypatch.setattr(memory_fit, "gauge_of", lambda device: gauge)
    return plan, build_rank(plan, 0, plugins, lambda phase, done, total: None, note=notes.append)


@pytest.mark.parametrize(
    ("steps", "extra"),
    some_slow_rows(
        [(steps, extra) for steps in (0, 2) for extra in (-7, 0, 4, 50)],
        [(0, -7), (0, 4), (2, 0), (2, 50)],
    ),
)
def test_an_engine_takes_what_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugins: PluginSet, extra: int, steps: int
) -> None:
    """Pool, draft state and scheduler agree on the number of pages, and every line is reported."""
    config: dict[str, Any] = (
        {"speculative": {"use": "nextn", "adaptive": False, "steps": steps}} if steps else {}
    )
    probe, _ = started(monkeypatch, tmp_path, plugins, Pretend(1 << 40, 1 << 40, 0), [], **config)
    page_bytes = sum(
        line.bytes for line in probe.budget if line.name in ("kv cache", "page states")
    )
    page_bytes //= probe.sizes.num_pages
    total, wanted, notes = 1 << 32, probe.sizes.num_pages + extra, list[str]()
    free = total - int(total * 0.98) + wanted * page_bytes + 5000 + page_bytes // 2
    plan, engine = started(
        monkeypatch, tmp_path, plugins, Pretend(total, free, 5000), notes, **config
    )
    pages = min(wanted, plan.sizes.num_pages + 10)
    assert engine.scheduler.load().pages_total == pages - 1
    assert {len(t) for layer in engine.runner.attention._kv for t in layer.values()} == {
        pages * plan.sizes.page_size
    }
    if steps:
        assert len(engine.runner.speculative._page_ends.states) == pages
    info = engine.controls.handle(Control(1, "info")).data
    assert info["max_total_num_tokens"] == (pages - 1) * plan.sizes.page_size
    assert info["memory"]["activations"]["measured"] == info["memory"]["logits"]["served"] == 5000
    assert info["memory"]["step"] == {"planned": None, "measured": 10_000, "served": 5000}
    assert [note.partition(":")[0] for note in notes] == [
        "build",
        "weights",
        "kernels",
        "kv",
        "capture",
        "self-test",
        "memory, measured (difference to the plan)",
    ]
    assert "GB/s" in notes[1]
    assert (f"{plan.sizes.num_pages} planned" in notes[3]) == (pages != plan.sizes.num_pages)
    engine.close()


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_expandable_segments_keep_a_tenth_of_a_step_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugins: PluginSet, expandable_segments: bool
) -> None:
    probe, _ = started(monkeypatch, tmp_path, plugins, Pretend(1 << 40, 1 << 40, 0), [])
    page_bytes = (
        sum(line.bytes for line in probe.budget if line.name == "kv cache") // probe.sizes.num_pages
    )
    total, step = 1 << 32, 100 * page_bytes
    free = (
        total
        - int(total * 0.98)
        + (probe.sizes.num_pages + 5) * page_bytes
        + step
        + page_bytes // 2
    )
    _, engine = started(
        monkeypatch, tmp_path, plugins, Pretend(total, free, step), [], expandable_segments
    )
    assert (
        engine.scheduler.load().pages_total
        == probe.sizes.num_pages + 5 - 10 * expandable_segments - 1
    )
    engine.close()


def test_too_few_pages_end_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugins: PluginSet
) -> None:
    with pytest.raises(
        GlowplugError, match=r"are left for the KV cache.*measured against planned: .*activations"
    ):
        started(monkeypatch, tmp_path, plugins, Pretend(1 << 32, 1 << 26, 5000), [])


def test_an_out_of_memory_error_names_its_phase(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugins: PluginSet
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(memory_fit, "most_tokens", fail)
    with pytest.raises(
        GlowplugError,
        match=r"out of device memory in phase kernels; measured so far: weights .*chunk",
    ):
        started(monkeypatch, tmp_path, plugins, Pretend(1 << 32, 1 << 31, 0), [])


def test_a_meter_adds_up_and_moves() -> None:
    gauge = Pretend(100, 50, 7)
    meter = MemoryMeter(gauge)
    monotone = iter([1500, 1500, 1800])
    gauge.held = lambda: next(monotone)  # type: ignore[method-assign]
    meter.mark("weights")
    meter.move("weights", "rotary tables", 100)
    meter.mark("kv cache")
    meter.mark("weights")
    assert meter.lines == {"weights": 700, "rotary tables": 100, "kv cache": 0}


@pytest.mark.parametrize(
    ("size", "seconds", "said"),
    [
        (31_400_000_000, 2.0, "31.4 GB, 15.7 GB/s"),
        (34_500_000, 0.3, "34.5 MB, 0.115 GB/s"),
        (0, 0.0, "0.0 MB, 0 GB/s"),
    ],
)
def test_small_models_have_a_rate_too(size: int, seconds: float, said: str) -> None:
    assert rate(size, seconds) == said


def test_exchange_buffers_are_measured_with_the_runtime() -> None:
    budget = [
        BudgetLine(name, size << 20, "")
        for name, size in (("weights", 100), ("cuda runtime", 700), ("exchange buffers", 100))
    ]
    plan = replace(bare_plan(num_pages=1, page_size=16), budget=tuple(budget))
    lines = {"weights": 110 << 20, "cuda runtime": 840 << 20, "graphs": 0}
    assert differences(plan, lines) == "weights 110.0 MiB (+10%), cuda runtime 840.0 MiB (+5%)"
    found = compared(plan, lines)
    assert "cuda runtime 840.0 MiB (800.0 MiB planned)" in found and found.endswith("graphs 0 B")
    reported = memory_fit.RankMemory(plan, Worker()).report()
    assert {name: line["planned"] for name, line in reported.items()} == {
        "weights": 100 << 20,
        "cuda runtime": 800 << 20,
    }
