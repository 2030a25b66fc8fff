"""Structured output with the embedded model: every finished answer follows its grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from glowplug import LLM, SamplingParams
from glowplug.core.engine.masks import StepMasks
from glowplug.core.errors import RequestError
from glowplug.core.speculation.forced_drafts import ForcedDrafts
from glowplug.core.step.structured import StructuredOutputsParams
from glowplug.entrypoints.bench.others.draft_settings import settled_stats
from glowplug.entrypoints.front.grammar_checks import GrammarChecks
from tests.e2e.structured import QUESTION, run

SMALL = {"scheduler": {"max_running_requests": 8}}
CHAIN = {"speculative": {"use": "nextn", "steps": 3}}
TREE = {"speculative": {"use": "nextn", "steps": 3, "topk": 2, "draft_tokens": 6}}
PLAIN = {"enable_thinking": False}
SHORT = (2, 3, 6, 8, 10)  #: seeds of schemas that are answered with few tokens
WORD = SamplingParams(regex="[ab]{3}c{2,4}", temperature=1.5, seed=5, max_tokens=40)


@pytest.fixture(scope="module")
def checks() -> Iterator[dict[str, GrammarChecks]]:
    """Worker processes that the engines of this module share."""
    held: dict[str, GrammarChecks] = {}
    yield held
    for one in held.values():
        one.close()


@pytest.fixture
def engine(checks: dict[str, GrammarChecks], monkeypatch: pytest.MonkeyPatch) -> Any:
    def opened(**config: Any) -> LLM:
        llm = LLM(**{**SMALL, **config})
        library = config.get("grammar", {}).get("use", "llguidance")
        shared = checks.setdefault(library, llm._grammars)
        shared._kinds = llm._grammars._kinds
        llm._grammars = shared
        monkeypatch.setattr(shared, "close", lambda: None)
        return llm

    return opened


@pytest.mark.parametrize(
    "config",
    [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in (CHAIN, TREE))],
    ids=["none", "chain", "tree"],
)
def test_every_finished_answer_follows_its_schema(engine: Any, config: dict[str, Any]) -> None:
    with engine(**config) as llm:
        whole = run(llm, range(4), streamed=False, thinking=False)
        streamed = run(llm, range(2), streamed=True, thinking=False)
        thought = run(llm, range(10, 12), streamed=False, thinking=True)
        assert llm.stats.masked_steps > 0 and llm.stats.mask_waits == 0
        assert llm.control("check")
    for found in (whole, streamed, thought):
        assert found.wrong == [] and found.finished > 0
    assert streamed.texts == whole.texts[:2]
    assert all("</think>" in text for text in thought.texts)


def test_xgrammar_follows_schemas_with_drafts(engine: Any) -> None:
    pytest.importorskip("xgrammar")
    texts = []
    for config in ({}, CHAIN, TREE):
        with engine(**config, grammar={"use": "xgrammar"}) as llm:
            found = run(llm, SHORT, streamed=False, thinking=False, max_tokens=60)
            assert llm.stats.masked_steps > 0 and llm.stats.mask_waits == 0
            assert llm.control("check")
        assert found.wrong == [] and found.finished > 0
        texts.append(found.texts)
    assert texts[0] == texts[1] == texts[2]


def test_drafts_overlap_and_recomputation_change_no_answer(engine: Any) -> None:
    """The pool is so small that sequences are preempted, and prompts are computed in chunks."""
    seeds = range(8)
    with engine() as llm:
        plain = run(llm, seeds, streamed=False, thinking=False, max_tokens=80)
    small = {
        "scheduler": {"max_running_requests": 8, "overlap": True, "chunk_size": 16},
        "memory": {"kv_tokens": 320},
        "context_length": 256,
    }
    for config in ({}, CHAIN, TREE):
        with engine(**{**small, **config}) as llm:
            other = run(llm, seeds, streamed=False, thinking=False, max_tokens=80)
            assert llm.stats.preemptions > 0
        assert other.texts == plain.texts and other.wrong == []


@pytest.mark.parametrize("groups", [False, True], ids=["tp2", "dp2"])
def test_ranks_make_the_same_masks(groups: bool) -> None:
    parallel = [{"use": "tensor", "size": 2}]
    if groups:
        parallel.append({"use": "dp_attention", "size": 2})
    with LLM(**SMALL, parallel=parallel, executor={"use": "multiprocess"}) as llm:  # type: ignore[arg-type]
        found = run(llm, SHORT, streamed=False, thinking=False, max_tokens=60)
        assert llm.stats.masked_steps > 0
    assert found.wrong == [] and found.finished > 0


def test_rows_with_and_without_a_grammar_share_steps(engine: Any) -> None:
    free = SamplingParams(temperature=1.5, seed=5, max_tokens=12)
    with engine() as llm:
        alone = llm.chat(QUESTION, free, **PLAIN)[0].text
        mixed = llm.chat(
            [QUESTION] * 4, [WORD, free, WORD.replace(n=3, temperature=9.0), free], **PLAIN
        )
    assert mixed[1].text == mixed[3].text == alone
    texts = [mixed[0].text, *(choice.text for choice in mixed[2].choices)]
    assert all(re.fullmatch("[ab]{3}c{2,4}", text) for text in texts)
    assert len(set(texts)) > 1, "each of n choices has a matcher of its own"


@pytest.mark.parametrize("config", [{}, CHAIN], ids=["none", "chain"])
def test_the_end_of_a_grammar_ends_the_answer(engine: Any, config: dict[str, Any]) -> None:
    with engine(**config) as llm:
        for params in (WORD, WORD.replace(ignore_eos=True)):
            done = llm.chat(QUESTION, params, **PLAIN)[0]
            assert done.finish_reason == "stop" and re.fullmatch("[ab]{3}c{2,4}", done.text)
        cut = llm.chat(QUESTION, WORD.replace(max_tokens=2), **PLAIN)[0]
    assert cut.finish_reason == "length" and done.text.startswith(cut.text)


def test_log_probabilities_are_those_after_the_mask(engine: Any) -> None:
    with engine() as llm:
        forced = SamplingParams(
            structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), logprobs=5, seed=1
        )
        answer = llm.chat(QUESTION, forced, **PLAIN)[0]
    assert answer.text in ("yes", "no") and answer.logprobs is not None
    first = answer.logprobs
    assert sum(2.718281828**value for value in first.top[0]) == pytest.approx(1.0, abs=1e-3)
    assert first.token[-1] == pytest.approx(0.0, abs=1e-5), "only the end is allowed"


def test_every_kind_is_served_offline(engine: Any) -> None:
    tag = {"type": "structural_tag", "structures": [{"begin": "<n>", "schema": {"type": "integer"},
           "end": "</n>"}], "triggers": ["<n>"]}  # fmt: skip
    cases = [
        (SamplingParams(ebnf='root ::= "a" [0-9]+ "."', max_tokens=64), r"a[0-9]+\."),
        (SamplingParams(structured_outputs=StructuredOutputsParams(grammar='start: "x" /[yz]/')),
         "x[yz]"),
        (SamplingParams(json_schema='{"enum":["only"]}'), '"only"'),
        (SamplingParams(structural_tag=tag, max_tokens=8), "(?s).*"),
    ]  # fmt: skip
    with engine() as llm:
        for params, pattern in cases:
            answer = llm.chat(QUESTION, params.replace(seed=3), **PLAIN)[0]
            assert re.fullmatch(pattern, answer.text), answer
        found = SamplingParams(
            structured_outputs=StructuredOutputsParams(json_object=True), max_tokens=300, seed=2
        )
        answer = llm.chat(QUESTION, found, **PLAIN)[0]
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.text), dict)


def test_a_grammar_that_fails_ends_its_request_only(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = StepMasks.begin

    def failing(self: StepMasks, batch: Any) -> None:
        begin(self, batch)
        for sequence, constraint in self._rows.values():
            if len(sequence.prompt) % 2 and batch.step > 8:
                constraint.failure = "it is too complex"

    monkeypatch.setattr(StepMasks, "begin", failing)
    long = SamplingParams(regex="[ab]{30}", temperature=1.5, seed=5, max_tokens=40)
    with engine() as llm:
        answers = llm.generate([[5, 6, 7], [5, 6]], long)
        assert llm.control("check") and llm.stats.running == 0
    assert answers[0].finish_reason == "error" and "too complex" in str(answers[0].error)
    assert re.fullmatch("[ab]{30}", answers[1].text)


def test_engines_without_a_library_refuse_grammars() -> None:
    with LLM(grammar={"use": "none"}) as llm:
        with pytest.raises(RequestError, match="grammar.use = none"):
            llm.generate("hi", SamplingParams(regex="a"))
    simulated = {"use": "nextn", "steps": 1, "simulate_accept_rates": [0.5]}
    with LLM(speculative=simulated, benchmark=True) as llm:
        with pytest.raises(RequestError, match="simulated"):
            llm.generate("hi", SamplingParams(regex="a"))


FORCED = {
    "type": "object",
    "properties": {
        "description": {"enum": ["abcdefghijklmnop"]},
        "identifier": {"type": "integer", "minimum": 5, "maximum": 9},
    },
    "required": ["description", "identifier"],
    "additionalProperties": False,
}
COMPACT = StructuredOutputsParams(json=FORCED, disable_any_whitespace=True)


def forced_steps(
    engine: Any, monkeypatch: pytest.MonkeyPatch, offered: bool, **config: Any
) -> tuple[list[str], int]:
    """Return answers that are almost forced, and the steps of the engine."""
    params = [
        SamplingParams(temperature=1.5, max_tokens=80, seed=seed, structured_outputs=COMPACT)
        for seed in range(3)
    ]
    with monkeypatch.context() as patch, engine(**config) as llm:
        if not offered:
            patch.setattr(ForcedDrafts, "offer", lambda *_: None)
        before = settled_stats(llm).steps
        answers = llm.chat([QUESTION] * 3, params, **PLAIN)
        steps = settled_stats(llm).steps - before
    assert [answer.finish_reason for answer in answers] == ["stop"] * 3
    return [answer.text for answer in answers], steps


@pytest.mark.parametrize(
    ("library", "overlap"), [("llguidance", True), ("llguidance", False), ("xgrammar", True)]
)
def test_forced_tokens_are_drafted(
    engine: Any, monkeypatch: pytest.MonkeyPatch, library: str, overlap: bool
) -> None:
    pytest.importorskip(library)
    same = {
        "scheduler": {"max_running_requests": 8, "overlap": overlap},
        "grammar": {"use": library},
    }
    fixed = {"speculative": {**CHAIN["speculative"], "adaptive": False}, **same}
    plain, all_steps = forced_steps(engine, monkeypatch, True, **same)
    drafted, without = forced_steps(engine, monkeypatch, False, **fixed)
    texts, steps = forced_steps(engine, monkeypatch, True, **fixed)
    assert texts == drafted == plain
    assert steps < without <= all_steps
