"""The sample speculative algorithm of a third party: two files over the public interface, which
pass the suite, change no greedy token, and are found by their entry point when installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import PlanRefused
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import Limits, SpeculativeAlgorithm, Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.speculative import SpeculativeSuite
from tests.support.tiny import write_config

ROOT = Path(__file__).parents[2]
PACKAGE = Path(__file__).parent / "glowplug-lines"
SOURCE = PACKAGE / "src"
PUBLIC = ("api", "protocols", "step", "speculation", "layers")
VOCAB = 12
NEWLINE = 3
PLUGIN = ["glowplug_lines.plugin"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SOURCE))
        yield


class TestLines(SpeculativeSuite):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        from glowplug_lines.plugin import LinesOptions
        from glowplug_lines.runtime import Lines

        options = LinesOptions(newline=NEWLINE, steps=3)
        algorithm = Lines(options, bare_plan(width=4, draft_shape=options.draft_shape()), Worker())
        algorithm.reserve(limits)
        return algorithm


def test_drafts_are_the_line_above() -> None:
    import torch

    algorithm: Any = TestLines().make(Limits(3, 20, 9, 4, VOCAB))
    n = NEWLINE
    text = [
        [5, 6, 7, 8, n, 5, 9],  # continues in the second column
        [4, n, 5, 6, n],  # begins the line
        [5, 6, 7],  # has no line above
    ]
    table = torch.zeros(3, 20, dtype=torch.int32)
    for row, line in enumerate(text):
        table[row, : len(line)] = torch.tensor(line)
    drafts = algorithm.propose(table, torch.arange(3), torch.tensor([7, 5, 3]), DraftShape.chain(3))
    assert drafts.tolist() == [[7, 8, n], [5, 6, n], [7, 7, 7]]


def test_it_imports_the_public_interface_only() -> None:
    modules = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("glowplug."):
                modules.add(str(node.module))
    assert modules
    allowed = tuple(f"glowplug.core.{part}" for part in PUBLIC)
    assert [module for module in sorted(modules) if not module.startswith(allowed)] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB)


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 2048},
        "attention": {"page_size": 4},
    }
    return LLM(model=str(folder), plugins=PLUGIN, **{**base, **config})


@pytest.mark.parametrize("more", [{}, {"scheduler": {"chunk_size": 7, "overlap": False}}])
def test_greedy_tokens_are_those_without_drafts(folder: Path, more: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    line = [*rng.integers(4, VOCAB, 6).tolist(), NEWLINE]
    prompts = [(line * 5)[:n] for n in (1, 8, 20, 33)]
    with engine(folder) as llm:
        want = [one.token_ids for one in llm.generate(prompts, GREEDY)]
    with engine(folder, speculative={"use": "lines", "newline": NEWLINE}, **more) as llm:
        for _ in range(2):  # the second time with a warm cache
            assert [one.token_ids for one in llm.generate(prompts, GREEDY)] == want
        assert 0 < llm.stats.accepted_tokens < llm.stats.drafted_tokens
        assert llm.plan.choice("speculative").name == "lines"
        assert "draft state" in {line.name for line in llm.plan.budget}


def test_an_id_that_no_token_has_is_refused(folder: Path) -> None:
    with pytest.raises(PlanRefused) as caught:
        engine(folder, speculative={"use": "lines", "newline": VOCAB})
    assert [refusal.field for refusal in caught.value.refusals] == ["speculative.newline"]
