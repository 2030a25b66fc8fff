"""Replays of a step with drafts: one for the round of drafts, one for the target, one for the rest.

Captured steps are functions (tests.plugins.replaying).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug import LLM
from glowplug.core.engine.runner import Runner
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.step.batch import Batch
from glowplug.plugins.graphs.capture.decode_graph import DecodeGraph
from tests.e2e.test_switching_drafts import PLUGINS, config_of
from tests.plugins.replaying_runtime import NEWEST
from tests.support.draft_requests import GREEDY, features, prompts, same

STEPS = 3
PLAIN = GREEDY.replace(logprobs=None)
FULL = DraftShape.chain(STEPS)
TREE: dict[str, Any] = {"steps": STEPS, "topk": 3, "draft_tokens": 8}
PASSES = tuple(f"draft {number}" for number in range(1, STEPS + 1))
LAST = ("last draft places", "last draft")
ACCEPT = "accept greedy"
#: drafts -> pieces of a greedy step with a round in one piece, and pass by pass
ROUNDS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "nextn": ({"steps": STEPS}, ("drafts",), ("draft places", *PASSES)),
    "eagle": ({"use": "eagle", "steps": STEPS}, ("drafts",), ("draft places", *PASSES)),
    "standalone": (
        {"use": "standalone", "steps": STEPS},
        ("drafts",),
        ("draft places", *PASSES, *LAST),
    ),
    "tree": (TREE, ("drafts",), ("draft places", *PASSES, "places")),
    "ngram": ({"use": "ngram", "steps": STEPS}, ("draft",), ("draft",)),
}


def replayed(folder: Path, drafts: dict[str, Any], one_piece: bool, **scheduler: Any) -> LLM:
    graphs = {"use": "replaying", "batch_sizes": [2, 8], "one_piece": one_piece}
    # without overlap, because functions overwrite the results of the step in flight
    changes = {"graphs": graphs, "scheduler": {"overlap": False, **scheduler}}
    return LLM(plugins=PLUGINS, **config_of(folder, drafts, **changes))


def runner_of(llm: LLM) -> Runner:
    executor: Any = llm._executor
    runner: Runner = executor._engine.runner
    return runner


@pytest.mark.parametrize("one_piece", [True, False], ids=["one_piece", "pass_by_pass"])
@pytest.mark.parametrize("name", ROUNDS)
def test_replays_of_each_step(folder: Path, name: str, one_piece: bool) -> None:
    drafts, together, apart = ROUNDS[name]
    wanted = (*(together if one_piece else apart), "forward", ACCEPT)
    with LLM(**config_of(folder, {})) as llm:
        plain = llm.generate(prompts()[:3], PLAIN)
    with replayed(folder, {**drafts, "adaptive": False}, one_piece) as llm:
        runner = NEWEST[0]
        graphs = runner._decode_graphs[llm.plan.sizes.draft_shape]
        for graph in graphs.values():
            assert graph.pieces[: len(wanted)] == wanted
        begun = len(runner.begun)
        same(llm.generate(prompts()[:3], PLAIN), plain)
        counts = [*runner.begun[begun:], runner.functions.replays]
    each = [after - before for before, after in zip(counts, counts[1:])]
    assert len(each) > 3 and set(each) == {len(wanted)}


@pytest.mark.parametrize("use", ["nextn", "standalone"])
def test_every_depth_has_a_round_of_its_own(folder: Path, use: str) -> None:
    """Steps of different depths, also of none, replay as many graphs."""
    drafts = {"use": use, "steps": STEPS}
    with LLM(**config_of(folder, {})) as llm:
        wanted = [llm.generate(prompts(), PLAIN), llm.generate(prompts(), features())]
    with replayed(folder, drafts, True, pattern=(2, 0, 1, 2), max_running_requests=8) as llm:
        runner = NEWEST[0]
        begun = len(runner.begun)
        same(llm.generate(prompts(), PLAIN), wanted[0])
        counts = [*runner.begun[begun:], runner.functions.replays]
        each = zip(runner.drafts[begun:], [b - a for a, b in zip(counts, counts[1:])])
        assert set(each) == {(shape, 3) for shape in (NO_DRAFTS, DraftShape.chain(1), FULL)}
        same(llm.generate(prompts(), features()), wanted[1])


#: methods of tensors and of CUDA's objects that wait for the device
WAITS = (
    *((torch.Tensor, name) for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__")),
    (torch.cuda, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
)


class Events:
    """The order of events in steps that are replayed.

    Attributes:
        noted: names of pieces when they begin, of calls inside them as "piece: call", and of calls
            that wait for the device outside all pieces as "waits: call".
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.noted: list[str] = []
        self._patch = patch
        self._piece: str | None = None
        self._launching = False
        self._excused = 0

    def wrap(self, owner: Any, name: str, note: Callable[[], None] | None = None) -> None:
        """Have ``note`` called before the method ``name`` of ``owner``."""
        inner = getattr(owner, name)

        def noting(*args: Any, **named: Any) -> Any:
            if note is not None:
                note()
            return inner(*args, **named)

        self._patch.setattr(owner, name, noting)

    def call(self, name: str) -> None:
        """Note a call inside a piece."""
        if self._launching:
            self.noted.append(f"{self._piece}: {name}")

    def wait(self, name: str) -> None:
        """Note a call that waits, unless it is in a piece or in attention on a CPU."""
        if self._launching and self._piece is None and not self._excused:
            self.noted.append(f"waits: {name}")

    def follow(self, runner: Any) -> None:
        """Follow the pieces, launches and waits of ``runner``."""
        run, launch, plan = DecodeGraph.run, Runner.launch, runner.attention.plan_step

        def piece(graph: DecodeGraph, name: str, work: Callable[[], Any]) -> Any:
            self.noted.append(name)
            with self._set(_piece=name):
                return run(graph, name, work)

        def launched(own: Runner, batch: Batch) -> Any:
            self.noted.append("step")
            with self._set(_launching=batch.num_decodes == batch.num_rows):
                return launch(own, batch)

        def planned(batch: Batch, graph: object | None) -> None:
            with self._set(_excused=True):
                plan(batch, graph)

        self._patch.setattr(DecodeGraph, "run", piece)
        self._patch.setattr(Runner, "launch", launched)
        self._patch.setattr(runner.attention, "plan_step", planned)
        for owner, name in WAITS:
            self.wrap(owner, name, lambda name=name: self.wait(name))  # type: ignore[misc]

    @contextmanager
    def _set(self, **values: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


def test_a_step_is_launched_without_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's entries of accepted tokens are written in the piece that accepts them. The host
    reads nothing between the pieces of a step, and the next ones are those of the next step.
    """
    events = Events(monkeypatch)
    with replayed(folder, {"steps": STEPS, "adaptive": False}, True) as llm:
        runner: Any = runner_of(llm)
        events.follow(runner)
        draft = runner.speculative._model
        events.wrap(draft, "fill", lambda: events.call("draft extend"))
        events.wrap(draft, "forward", lambda: events.call("draft pass"))
        events.wrap(runner.sampler, "sample", lambda: events.call("sample"))
        llm.generate(prompts()[:2], PLAIN)
    passes = ["drafts: draft pass"] * STEPS
    accepting = [ACCEPT, f"{ACCEPT}: sample", f"{ACCEPT}: draft extend"]
    step = ["step", "drafts", *passes, "forward", *accepting]
    first = events.noted.index("drafts") - 1
    noted = events.noted[first:]
    assert len(noted) >= 3 * len(step) and len(noted) % len(step) == 0
    assert noted == step * (len(noted) // len(step))
    assert not [name for name in events.noted if name.startswith("waits")]


def test_a_wait_between_pieces_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before notices a step that reads a result on the host."""
    events = Events(monkeypatch)
    with replayed(folder, {"steps": STEPS, "adaptive": False}, True) as llm:
        runner: Any = runner_of(llm)
        plan = runner.step_logits.plan_step
        known = torch.ones(1)

        def reading() -> None:
            plan()
            known.item()

        events.follow(runner)
        monkeypatch.setattr(runner.step_logits, "plan_step", reading)
        llm.generate(prompts()[:1], PLAIN)
    assert "waits: item" in events.noted
