"""Faults planted in graph runners and executors, which run a small engine."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.messages import Abort, StepOutput, decode_inbound, decode_outbound, encode
from glowplug.core.testing.harness.ranks import THREADS, RankSet
from glowplug.core.testing.suites.executors import ExecutorSuite
from glowplug.core.testing.suites.graphs import GraphSuite
from glowplug.plugins.executors.inline import InlineOptions
from glowplug.plugins.executors.inline_runtime import InlineExecutor
from tests.mutants.framework import Mutant, Planter
from tests.support.tiny import write_config

FOLDER = tempfile.TemporaryDirectory(prefix="glowplug-mutants-")  #: removed at exit


@functools.cache
def model() -> str:
    """Return the folder of a small model."""
    return str(write_config(Path(FOLDER.name) / "model", "llama", num_hidden_layers=1))


@functools.cache
def plugins() -> PluginSet:
    return load_plugins([THREADS, "tests.plugins.replaying"], entry_points=False)


def config() -> dict[str, Any]:
    return {
        "model": model(),
        "weights": {"use": "random"},
        "device": "cpu",
        "skip_tokenizer": True,
        "dtype": "float32",
        "context_length": 256,
        "memory": {"kv_tokens": 1024},
        "scheduler": {"max_running_requests": 4},
    }


# ---- graph runners -------------------------------------------------------------------------------


class Graphs(GraphSuite):
    graphs = {"use": "replaying"}

    def config(self) -> dict[str, Any]:
        return config()

    def plugins(self) -> PluginSet:
        return plugins()


TOKENS = "test_tokens_are_those_of_eager_steps"


def runner(fault: str, by: str, method: str, body: Any) -> Mutant:
    """Return the mutant whose graph runner's ``method`` is ``body``, from the capture on."""

    def change(ranks: RankSet) -> None:
        graphs: Any = ranks.engines[0].runner.graphs
        correct = getattr(graphs, method)
        setattr(graphs, method, lambda *given: body(correct, *given))

    return Planter("graphs", Graphs, "ranks").change(fault, by, change)


def _other_tokens(fill: Any, graph: Any, batch: Any) -> Any:
    filled = fill(graph, batch)
    filled.row_ids.copy_(filled.row_ids.flip(0))
    return filled


def _late_pages(fill: Any, graph: Any, batch: Any) -> Any:
    kept = graph.batch.page_table.clone() if hasattr(graph, "batch") else None
    filled = fill(graph, batch)
    filled.page_table.copy_(kept if kept is not None else filled.page_table * 0)
    return filled


def _short(fill: Any, graph: Any, batch: Any) -> Any:
    filled = fill(graph, batch)
    filled.kv_lens_device.clamp_(max=8)
    return filled


def _shifted(fill: Any, graph: Any, batch: Any) -> Any:
    filled = fill(graph, batch)
    filled.positions.mul_(2)
    return filled


def _raising(close: Any) -> None:
    raise RuntimeError("closed already")


GRAPHS: list[Mutant] = [
    runner("rows of a graph are mixed up", TOKENS, "fill", _other_tokens),
    runner("pages of the step before are read", TOKENS, "fill", _late_pages),
    runner("lengths stop growing", TOKENS, "fill", _short),
    runner("positions are doubled", TOKENS, "fill", _shifted),
    runner(
        "no step is replayed",
        "test_steps_of_the_stated_shapes_are_replayed",
        "graph_for",
        lambda f, batch: None,
    ),
    runner(
        "no shape is stated",
        "test_steps_of_the_stated_shapes_are_replayed",
        "shapes",
        lambda f, plan: [],
    ),
    runner(
        "a shape is stated twice",
        "test_steps_of_the_stated_shapes_are_replayed",
        "shapes",
        lambda f, plan: f(plan) * 2,
    ),
    runner("the second close raises", "test_it_closes_twice", "close", _raising),
]

# ---- executors -----------------------------------------------------------------------------------


class Executors(ExecutorSuite):
    seconds = 3.0

    def make(self, plan: EnginePlan) -> Any:
        return InlineExecutor(InlineOptions(), plan, None)

    def config(self) -> dict[str, Any]:
        return {**config(), "executor": {"use": "inline"}}

    def plugins(self) -> PluginSet:
        return load_plugins(entry_points=False)


executor = Planter("executor", Executors)
SAME = "test_tokens_are_those_of_the_ranks"


def answered(fault: str, by: str, change: Any) -> Mutant:
    """Return the mutant whose frames of results are changed."""

    def outputs(correct: Any, timeout: float | None) -> Any:
        frame = correct(timeout)
        return frame if frame is None else change(frame)

    return executor.swap(fault, by, "outputs", outputs)


def _twice(frame: bytes) -> bytes:
    messages = decode_outbound(frame)
    return encode([*messages, *(one for one in messages if isinstance(one, StepOutput))])


def _without_tokens(frame: bytes) -> bytes:
    messages = decode_outbound(frame)
    return encode([one for one in messages if not isinstance(one, StepOutput) or one.finished])


def _no_aborts(submit: Any, data: bytes) -> None:
    submit(encode([one for one in decode_inbound(data) if not isinstance(one, Abort)]))


def _first_only(submit: Any, data: bytes) -> None:
    submit(encode(decode_inbound(data)[:1]))


def _quiet(correct: Any, plan: Any) -> None:
    try:
        correct(plan)
    except Exception:
        return


def _silent(outputs: Any, timeout: float | None) -> Any:
    try:
        return outputs(timeout)
    except Exception:
        return None


EXECUTORS: list[Mutant] = [
    answered("results arrive twice", SAME, _twice),
    answered("steps without an end are dropped", SAME, _without_tokens),
    answered(
        "replies are dropped",
        "test_a_control_is_answered",
        lambda frame: encode(
            [one for one in decode_outbound(frame) if isinstance(one, StepOutput)]
        ),
    ),
    executor.swap("only a frame's first message is sent", SAME, "submit", _first_only),
    executor.swap("aborts are not sent", "test_an_abort_arrives", "submit", _no_aborts),
    executor.swap(
        "the end of the engine is silent", "test_a_stopped_engine_says_so", "outputs", _silent
    ),
    executor.swap("a failed start is silent", "test_a_start_that_fails_raises", "start", _quiet),
    executor.change("it does not lead", SAME, lambda made: setattr(made, "leads", False)),
]
MUTANTS = [*GRAPHS, *EXECUTORS]
