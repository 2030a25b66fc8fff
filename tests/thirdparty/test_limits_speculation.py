"""Limits of the speculative slot that algorithms of third parties met.

An algorithm chooses the size of the drafts of each step, and its draft has several layers in the
target's KV pool and reads hidden states of chosen layers. Rows with fewer drafts than others: see
``test_ngram``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.api import DraftShape, PlanRefused
from tests.plugins import lookahead
from tests.support.tiny import CONFIGS, write_config
from tests.thirdparty.packages import FOLDER

OWN = """
from dataclasses import replace
from typing import Literal

import glowplug_lines.plugin as sample
from glowplug.core.api import hookimpl

class OwnOptions(sample.LinesOptions):
    use: Literal["own_sizes"] = "own_sizes"

@hookimpl
def register_speculative_algorithms():
    (lines,) = sample.register_speculative_algorithms()
    return [replace(lines, name="own_sizes", options=OwnOptions, factory="own_sizes_runtime:Own")]
"""
RUNTIME = """
from glowplug_lines.runtime import Lines

class Turns:
    clocked = False
    seen = []

    def __init__(self, shapes):
        self.shapes = shapes
        self.steps = 0

    def choose(self, rows, most):
        self.steps += 1
        return self.shapes[self.steps % len(self.shapes)]

    def observe(self, rows, shape, counts):
        self.seen.append((shape, counts.copy()))

    def took(self, rows, shape, seconds):
        raise AssertionError("clocked is False")

    def forget(self, row):
        pass

class Own(Lines):
    def draft_policy(self, shapes, costs):
        return Turns(shapes)
"""


@pytest.fixture
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER / "glowplug-lines" / "src"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_sizes.py").write_text(OWN)
    (tmp_path / "own_sizes_runtime.py").write_text(RUNTIME)
    yield


@pytest.mark.usefixtures("_package")
def test_an_algorithm_chooses_the_width_of_each_step(tmp_path: Path) -> None:
    base: dict[str, Any] = {
        "model": str(write_config(tmp_path / "model", "llama")),
        "weights": {"use": "random"},
        "executor": {"use": "inline"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 128,
        "memory": {"kv_tokens": 1024},
    }
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[3, 4, 5, 3, 4], [7, 3, 9]]
    with LLM(**base) as llm:
        want = [one.token_ids for one in llm.generate(prompts, params)]
    own = {"use": "own_sizes", "steps": 3, "newline": 3}
    with LLM(**base, plugins=["own_sizes"], speculative=own) as llm:
        shapes = llm.plan.sizes.draft_shapes
        assert [one.token_ids for one in llm.generate(prompts, params)] == want
    from own_sizes_runtime import Turns  # type: ignore[import-not-found]

    taken = [shape for shape, _ in Turns.seen]
    assert set(taken) == set(shapes) and len(shapes) > 1 and DraftShape.chain(3) in shapes
    pairs = zip(taken, taken[1:])
    assert all(shapes.index(b) == (shapes.index(a) + 1) % len(shapes) for a, b in pairs)
    assert all((np.asarray(counts) <= shape.steps + 1).all() for shape, counts in Turns.seen)


HOLDING = """
from glowplug_lines.runtime import Lines

class Own(Lines):
    held = {}  # row -> id of its sequence
    ended = []
    wrong = []

    def draft(self, batch):
        for row in batch.left:
            self.ended.append(self.held.pop(row, None))
        for one in batch.joined:
            if one.row in self.held:
                self.wrong.append((one.row, self.held[one.row], one.id))
            if one.row >= 0:
                self.held[one.row] = one.id
        return super().draft(batch)
"""


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize("graphs", ["eager", "replaying"])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_algorithm_sees_that_a_row_was_left(
    tmp_path: Path, graphs: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is left before its next sequence joins, also in steps that are replayed."""
    (tmp_path / "own_sizes_runtime.py").write_text(HOLDING)
    monkeypatch.delitem(sys.modules, "own_sizes_runtime", raising=False)
    monkeypatch.delitem(sys.modules, "own_sizes", raising=False)
    lengths = [4, 30, 9, 17, 12]
    asked = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [[3 + number, 4, 5, 3] for number in range(len(lengths))]
    with LLM(
        model=str(write_config(tmp_path / "model", "llama")),
        plugins=["own_sizes", "tests.plugins.replaying"],
        speculative={"use": "own_sizes", "steps": 3, "newline": 3},
        scheduler={"max_running_requests": 2, "overlap": overlap},
        graphs={"use": graphs},
        weights={"use": "random"},
        executor={"use": "inline"},
        skip_tokenizer=True,
        dtype="float32",
        device="cpu",
        context_length=128,
        memory={"kv_tokens": 1024},
    ) as llm:
        llm.generate(prompts, asked)
        llm.generate(prompts[:1], asked[0])  # its first step has the last rows that were left
        from own_sizes_runtime import Own  # type: ignore[import-not-found]

        assert Own.wrong == []
        assert len(set(Own.ended)) == len(Own.ended) == len(lengths)
        assert len(Own.held) == 1


# ---- layers and hidden states of a draft ---------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
LAYERS = 2  #: of the draft


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    target = write_config(tmp_path / "model", "llama", vocab_size=12)
    shape = lookahead.config_of({**CONFIGS["llama"], "vocab_size": 12}, LAYERS)
    draft = write_config(tmp_path / "draft", "llama", **shape)
    return {
        "model": str(target),
        "plugins": ["tests.plugins.lookahead"],
        "speculative": {"use": "lookahead", "draft_model": str(draft)},
        "weights": {"use": "random"},
        "executor": {"use": "inline"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 128,
        "memory": {"kv_tokens": 512},
    }


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    shared = rng.integers(2, 12, 40).tolist()
    return [shared[:at] + rng.integers(2, 12, 60 - at).tolist() for at in (0, 16, 33, 40)]


@pytest.mark.parametrize(
    "more", [{}, {"scheduler": {"chunk_size": 7, "overlap": False}}, {"memory": {"kv_tokens": 208}}]
)
def test_a_draft_has_several_layers_in_the_pool(
    config: dict[str, Any], more: dict[str, Any]
) -> None:
    plain = {name: value for name, value in config.items() if name != "speculative"}
    with LLM(**plain) as llm:
        want = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
        layers = llm.plan.facts.model.num_layers
        bytes_of_a_layer = llm.plan.sizes.kv_bytes // llm.plan.sizes.num_pages // layers
    with LLM(**{**config, **more}) as llm:
        sizes = llm.plan.sizes
        assert sizes.draft_layers == LAYERS
        assert sizes.kv_bytes == sizes.num_pages * bytes_of_a_layer * (layers + LAYERS)
        for _ in range(2):  # the second time with cached prefixes
            assert [one.token_ids for one in llm.generate(prompts(), GREEDY)] == want
        assert 0 < llm.stats.accepted_tokens < llm.stats.drafted_tokens


def test_the_plan_counts_layers_and_hidden_states_of_a_draft(config: dict[str, Any]) -> None:
    from tests.plugins.lookahead_runtime import Layers

    with LLM(**config) as llm:
        lines = {line.name: line.bytes for line in llm.plan.budget}
        model = llm._executor._engine.runner.speculative._model  # type: ignore[attr-defined]
        assert isinstance(model, Layers)
        own = sum(math.prod(target.shape) for target in model.targets())
    assert lines["draft weights"] == 4 * own


FAMILY = """
from glowplug.core.api import Component, ModelOffers, Options, hookimpl

class OtherOptions(Options):
    use: str = "auto"

@hookimpl
def register_models():
    offers = ModelOffers(architectures=frozenset({"OtherForCausalLM"}))
    factory = "glowplug.models.llama:LlamaFamily"
    return [Component("other", OtherOptions, factory, offers, contract=2)]
"""


def test_a_family_without_hidden_states_of_layers_is_refused(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "other_family.py").write_text(FAMILY)
    shape = {"architectures": ["OtherForCausalLM"], "vocab_size": 12}
    write_config(tmp_path / "model", "llama", **shape)
    with pytest.raises(PlanRefused) as caught:
        LLM(**{**config, "plugins": [*config["plugins"], "other_family"]})
    (refusal,) = caught.value.refusals
    assert refusal.field == "speculative.use"
    assert "reads the hidden states of 2 layers" in refusal.reason
