"""The library "llguidance": the threads that fill masks, and forced tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import Worker, words_of
from glowplug.core.startup.grammars import grammar_builder
from glowplug.core.step.structured import GrammarSpec

ROOT = Path(__file__).parents[2]


class Recorder:
    """The library's executor; it notes the masks that it is told to fill."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def unsafe_compute_mask_ptr(self, wanted: Any, start: int, size: int, rows: int) -> None:
        self.rows += [row for _, row in wanted]


def builder() -> Any:
    plugins = load_plugins(entry_points=False)
    plan = make_plan({"model": "embedded", "grammar": {"use": "llguidance"}}, plugins=plugins)
    return grammar_builder(plan, plugins, Worker())


@pytest.fixture(scope="module")
def one() -> Any:
    return builder()


@pytest.mark.parametrize(
    ("vocab", "cores", "parallel"), [(2048, 8, 0), (131072, 8, 5), (131072, 2, 0)]
)
def test_only_large_masks_are_filled_by_the_threads_of_the_library(
    one: Any, vocab: int, cores: int, parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = one.backend
    recorder = Recorder()
    filled: list[int] = []
    monkeypatch.setattr(backend, "_executor", recorder, raising=False)
    monkeypatch.setattr(backend, "_parallel", cores > 2, raising=False)
    masks = np.zeros((5, words_of(vocab)), np.int32)

    def fill(start: int, size: int) -> None:
        filled.append((start - masks.ctypes.data) // size)

    matcher: Any = SimpleNamespace(inner=SimpleNamespace(unsafe_compute_mask_ptr=fill))
    backend.fill([(matcher, row) for row in range(5)], masks)
    assert recorder.rows == list(range(parallel))
    assert filled == list(range(parallel, 5))


def test_forced_tokens_end_where_the_grammar_leaves_a_choice(one: Any) -> None:
    schema = {"enum": ["abcdef", "abcxyz"]}
    grammar = one.build(GrammarSpec("json_schema", json.dumps(schema)))
    matcher = grammar.compiled.matcher()
    forced = list(matcher.forced())
    mask = np.zeros(words_of(one.vocab), np.int32)
    assert forced
    for token in forced:
        matcher.fill(mask)
        assert np.unpackbits(mask.view(np.uint8)).sum() == 1
        assert matcher.accept(token)
    matcher.fill(mask)
    assert np.unpackbits(mask.view(np.uint8)).sum() > 1
    assert not matcher.forced()


def test_grammars_take_no_more_memory_than_they_state() -> None:
    """The cache of a rank is bounded in the sizes that grammars state."""
    command = [sys.executable, "-m", "tests.support.grammar_memory", "llguidance"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    for kind, one in json.loads(done.stdout).items():
        assert one["stated"] / 4 < one["grown"] < one["stated"], (kind, one)
