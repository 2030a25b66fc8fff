"""A third party's algorithm that chooses the size of the drafts of each step itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.api import DraftShape
from tests.support.tiny import write_config
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
