"""Requirements of several ranks, shown with the parts of one: lockstep, idle steps, strategies as a
stack, drafts.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.engine.engine import Engine
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.offers import Mode
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.startup.build_rank import build_rank
from glowplug.core.step.batch import Batch, StepShape
from glowplug.core.step.messages import Finished, Outbound, StepOutput, Submit, encode, packed_ids
from glowplug.core.step.request import SamplingParams as Params
from tests.support.tiny import write_config


class Wire:
    """Rank 0's broadcast as the other rank receives it."""

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        if data is None:
            return self.sent.popleft()
        self.sent.append(data)
        return data

    def close(self) -> None:
        return


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def planned(folder: Path, plugins: PluginSet, name: str = "v3", **config: Any) -> EnginePlan:
    return make_plan(
        {
            "model": str(write_config(folder, name)),
            "weights": {"use": "random"},
            "context_length": 96,
            "memory": {"kv_tokens": 512},
            "skip_tokenizer": True,
            **config,
        },
        plugins=plugins,
    )


def built(plan: EnginePlan, plugins: PluginSet) -> Engine:
    return build_rank(plan, 0, plugins, lambda phase, done, total: None)


def submit(id: int, prompt: list[int], max_tokens: int = 8, **more: Any) -> bytes:
    params = Params(temperature=0.8, seed=id, max_tokens=max_tokens, ignore_eos=True)
    return encode([Submit(id, packed_ids(prompt), params, **more)])


def told(outputs: list[Outbound] | None) -> list[Any]:
    """Return the messages for the front without statistics."""
    assert outputs is not None
    return [
        (o.ids, o.tokens, [(f.id, f.reason) for f in o.finished])
        for o in outputs
        if isinstance(o, StepOutput)
    ]


def ends(outputs: list[Outbound] | None) -> list[Finished]:
    return [
        end for output in outputs or [] if isinstance(output, StepOutput) for end in output.finished
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_in_lockstep_do_the_same(tmp_path: Path, plugins: PluginSet, overlap: bool) -> None:
    plan = planned(
        tmp_path,
        plugins,
        scheduler={"overlap": overlap, "max_running_requests": 2, "chunk_size": 8},
    )
    wire = Wire()
    leader, follower = built(plan, plugins), built(plan, plugins)
    follower.leads = False
    leader.collectives = follower.collectives = wire  # type: ignore[assignment]
    frames = [
        [submit(1, [5] * 20), submit(2, [9, 8, 7])],
        [],
        [submit(3, [4, 4, 4], 5)],
        [submit(4, [6])],
    ]
    tokens = 0
    for turn in range(80):
        mine = told(leader.turn(frames[turn] if turn < len(frames) else []))
        assert told(follower.turn()) == mine, turn
        assert follower.clock() == leader.clock()
        tokens += sum(len(made) for _, made, _ in mine)
        if leader.idle and turn > len(frames):
            break
    assert tokens == 8 + 8 + 5 + 8 and leader.idle and follower.idle
    assert leader.turn(stop=True) is None and follower.turn() is None


def test_deadlines_pass_by_rank_0s_clock(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower's own clock is far ahead; it must neither end a request that rank 0 keeps nor
    keep one that rank 0 ends.
    """
    plan, wire, now = planned(tmp_path, plugins), Wire(), [100.0]
    leader, follower = built(plan, plugins), built(plan, plugins)
    follower.leads = False
    leader.collectives = follower.collectives = wire  # type: ignore[assignment]

    def turn(frames: list[bytes]) -> tuple[list[Finished], list[Finished]]:
        monkeypatch.setattr("glowplug.core.engine.engine.time.monotonic", lambda: now[0])
        led = ends(leader.turn(frames))
        monkeypatch.setattr("glowplug.core.engine.engine.time.monotonic", lambda: now[0] + 1e6)
        return led, ends(follower.turn())

    assert turn([submit(1, [5, 6], 60, timeout=4.0)]) == ([], [])
    now[0] += 3.0
    assert turn([]) == ([], [])
    now[0] += 3.0
    found: tuple[list[Finished], list[Finished]] = ([], [])
    for _ in range(3):
        led, followed = turn([])
        found[0].extend(led)
        found[1].extend(followed)
    assert [end.reason for end in found[0]] == ["timeout"] and found[0] == found[1]


class Busy:
    """A strategy whose other rank always decodes: it only implements ``agree``."""

    def agree(self, local: StepShape) -> StepShape:
        return StepShape(Mode.DECODE, 3, 3) if local.mode is Mode.IDLE else local


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["v3", "v2", "llama", "v3_fp8"])
def test_an_idle_rank_steps_with_the_others(
    tmp_path: Path, plugins: PluginSet, name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its offers every built-in runs the mode "idle": a step without rows goes through all
    of them.
    """
    plan = planned(tmp_path, plugins, name, scheduler={"overlap": overlap})
    assert all(
        Mode.IDLE in found.component.offers.runs
        for slot in ("attention", "quantization", "sampling", "speculative", "ops")
        for found in plugins.components(slot)
    )
    alone, joined = built(plan, plugins), built(plan, plugins)
    joined.parallel = ParallelStack([Busy()])  # type: ignore[list-item]
    modes: list[Mode] = []
    launch: Callable[[Batch], Any] = joined.runner.launch
    monkeypatch.setattr(
        joined.runner, "launch", lambda batch: (modes.append(batch.mode), launch(batch))[1]
    )
    for _ in range(3):
        joined.turn()
    assert modes == [Mode.IDLE] * 3
    streams = []
    for engine in (alone, joined):
        outputs = engine.turn([submit(1, [5, 6, 7])])
        for _ in range(14):
            outputs = [*(outputs or []), *(engine.turn() or [])]
        streams.append([token for _, made, _ in told(outputs) for token in made])
    assert streams[0] == streams[1] and len(streams[0]) == 8
    assert {Mode.IDLE, Mode.PREFILL, Mode.DECODE} <= set(modes)


DRAFTER = """
from typing import Literal
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import SpeculativeOffers
from glowplug.core.plugin.speculative_options import SpeculativeOptions

class Options(SpeculativeOptions):
    use: Literal["scores"] = "scores"

@hookimpl
def register_speculative_algorithms():
    return [Component("scores", Options, "drafter_runtime:Scores",
                      offers=SpeculativeOffers(nextn_layer=True), summary="runs the NextN layer")]
"""
RUNTIME = """
import torch
from glowplug.plugins.speculative.none_runtime import NoSpeculation

SEEN = []

class Scores(NoSpeculation):
    def draft_model(self, context, family, target):
        self.draft_of = family.build_nextn(context, target)
        return self.draft_of

    def accept(self, logits, hidden, batch, sampler):
        accepted = super().accept(logits, hidden, batch, sampler)
        batch.extra["previous_hidden"] = hidden
        drafted = self.draft_of.forward(batch.input_ids, batch.positions, batch)
        SEEN.append((batch.num_tokens, self.draft_of.logits(drafted),
                     self.draft_of.layer.attention.index))
        return accepted
"""


def test_a_speculative_plugin_gets_its_next_token_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer is built, loaded, given a KV layer after the target's, and run on every step,
    through the protocols alone.
    """
    (tmp_path / "drafter.py").write_text(DRAFTER)
    (tmp_path / "drafter_runtime.py").write_text(RUNTIME)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    folder = write_config(tmp_path / "model", "v3", num_nextn_predict_layers=1)
    with LLM(
        model=str(folder),
        plugins=["drafter"],
        speculative={"use": "scores"},
        weights={"use": "random"},
        skip_tokenizer=True,
        context_length=64,
        memory={"kv_tokens": 256},
    ) as llm:
        plan = llm.plan
        assert plan.sizes.draft_layers == plan.facts.model.nextn_layers == 1
        greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        tokens = llm.generate([[5, 6, 7, 8]], greedy)[0].token_ids
    with LLM(
        model=str(folder),
        weights={"use": "random"},
        skip_tokenizer=True,
        context_length=64,
        memory={"kv_tokens": 256},
    ) as llm:
        assert llm.plan.sizes.draft_layers == 0 and llm.plan.sizes.kv_bytes < plan.sizes.kv_bytes
        assert llm.generate([[5, 6, 7, 8]], greedy)[0].token_ids == tokens
    seen = importlib.import_module("drafter_runtime").SEEN
    assert {count for count, _, _ in seen} >= {4, 1} and {index for _, _, index in seen} == {3}
    for count, logits, _ in seen:
        assert logits.shape == (count, plan.facts.model.vocab_size) and logits.isfinite().all()
        assert logits.std() > 0
