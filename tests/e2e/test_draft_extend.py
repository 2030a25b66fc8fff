"""A draft's pass over prompt tokens, replayed for a padded number of them, caches the same values
as the eager pass.

Drafts change no token, so the tests compare the draft's cache itself, and the number of accepted
drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug import LLM, SamplingParams
from glowplug.core.errors import CaptureError
from glowplug.core.step.graph_pieces import DIRECT
from glowplug.plugins.graphs.capture.decode_graph import DecodeGraph
from glowplug.plugins.speculative.shared.model_drafts import ModelDrafts
from tests.e2e.test_piecewise import COUNTS, LENGTHS, engine, prompts, results
from tests.plugins import replaying_runtime
from tests.support.slow_cases import some_slow
from tests.support.tiny import write_config

STEPS = 2
ROWS = {"max_running_requests": 7}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_cache": {"cache": {"use": "none"}},
    "chunks": {"scheduler": {**ROWS, "chunk_size": 11}},
    "page_1": {"attention": {"page_size": 1}},
    "in_turn": {"scheduler": {**ROWS, "overlap": False}},
    "one_step": {"speculative": {"use": "nextn", "adaptive": False, "steps": 1}},
}
SLOW = ("no_cache", "in_turn", "one_step")  #: 7 to 10 s each
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("v3"), "v3", num_hidden_layers=2, num_nextn_predict_layers=1
    )


def drafting(folder: Path, graphs: dict[str, Any] | None = None, **config: Any) -> LLM:
    return engine(
        folder,
        graphs,
        **{"speculative": {"use": "nextn", "adaptive": False, "steps": STEPS}, **config},
    )


def runner_of(llm: LLM) -> Any:
    executor: Any = llm._executor
    return executor._engine.runner


def draft_cache(llm: LLM) -> list[Tensor]:
    """Return the cache of the layer after the model's own layers, without the scratch page."""
    page = llm.plan.sizes.page_size
    return [entry[page:].clone() for entry in runner_of(llm).attention._kv[-1].values()]


def run(llm: LLM, replayed: bool) -> tuple[list[Any], list[Tensor]]:
    if not replayed:
        runner_of(llm).draft_extend.replacement = None
    return results(llm), draft_cache(llm)


@pytest.mark.parametrize("case", some_slow(CASES, SLOW))
def test_a_replayed_pass_caches_the_values_of_an_eager_one(folder: Path, case: str) -> None:
    """Prompts run alone and beside decoding rows, in chunks, after cached prefixes, with token
    counts on both sides of each captured one.
    """
    with drafting(folder, **CASES[case]) as llm:
        want, cached = run(llm, replayed=False)
    with drafting(folder, **CASES[case]) as llm:
        assert llm.plan.sizes.extend_tokens == llm.plan.sizes.pass_tokens == tuple(COUNTS)
        found, own = run(llm, replayed=True)
        called = replaying_runtime.NEWEST[0].extends.called
    assert found == want
    for one, other in zip(own, cached, strict=True):
        assert one.any() and torch.allclose(one, other, rtol=1e-4, atol=1e-5), (
            (one - other).abs().max()
        )
    assert all(replayed == (0 < tokens <= COUNTS[-1]) for tokens, replayed in called)
    assert len({tokens for tokens, replayed in called if replayed}) > 8
    assert case == "chunks" or any(
        not replayed for tokens, replayed in called if tokens > COUNTS[-1]
    )


def test_drafts_are_accepted_as_often(folder: Path, tmp_path: Path) -> None:
    few = write_config(
        tmp_path, "v3", num_hidden_layers=2, num_nextn_predict_layers=1, vocab_size=8
    )
    params, counts = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), []
    lines = [[token % 8 for token in line] for line in prompts(2)]
    for replayed in (False, True):
        with drafting(few) as llm:
            if not replayed:
                runner_of(llm).draft_extend.replacement = None
            llm.generate(lines, params)
            counts.append((llm.stats.drafted_tokens, llm.stats.accepted_tokens))
    assert counts[0] == counts[1] and counts[0][1] > 0


def test_without_padding_it_is_the_same_to_the_bit(folder: Path) -> None:
    """A GEMM with another number of rows may round differently."""
    found = []
    for replayed in (False, True):
        with drafting(folder, cache={"use": "none"}) as llm:
            if not replayed:
                runner_of(llm).draft_extend.replacement = None
            for count, line in zip(
                COUNTS, (prompts(5)[-1][: count + 1] for count in COUNTS), strict=True
            ):
                llm.generate([line], ONE)
                assert not replayed or replaying_runtime.NEWEST[0].extends.called[-1] == (
                    count,
                    True,
                )
                found.append(draft_cache(llm))
    for eager, replay in zip(found[: len(COUNTS)], found[len(COUNTS) :], strict=True):
        assert all(
            one.any() and torch.equal(one, other) for one, other in zip(eager, replay, strict=True)
        )


def test_prompt_logprobs_read_the_targets_states(folder: Path) -> None:
    """They are computed after the draft's pass, which may overwrite the target's states, so that
    pass is not replayed then.
    """
    params = SamplingParams(
        temperature=0.0, max_tokens=2, logprobs=2, prompt_logprobs=2, ignore_eos=True
    )
    found = []
    for graphs in ({"prefill": False, "prefill_tokens": None}, {}):
        with drafting(folder, graphs) as llm:
            done = llm.generate(prompts(3), params)
            found.append([(one.token_ids, one.logprobs, one.prompt_logprobs) for one in done])
            called = replaying_runtime.NEWEST[0].extends.called
            assert not any(replayed for tokens, replayed in called if tokens >= max(LENGTHS))
    assert repr(found[0]) == repr(found[1])


def test_padding_tokens_are_zero(folder: Path) -> None:
    """Values that a longer step left, even of a failed sequence, are cleared from the padding of a
    shorter one.
    """
    with drafting(folder) as llm:
        memory = replaying_runtime.NEWEST[0].extends._memory
        llm.generate([prompts(0)[12]], ONE)
        assert (
            memory._live == 31
            and memory._previous[:31].any(1).all()
            and memory._places[2, :31].all()
        )
        with torch.inference_mode():
            memory._previous[:31] = float("nan")
        llm.generate([prompts(0)[3]], ONE)
        assert memory._live == 4 and memory._previous[:4].isfinite().all()
        assert not memory._previous[4:].any() and not memory._places[:, 4:].any()
        assert all(part.isfinite().all() for part in runner_of(llm).attention._kv[-1].values())


def test_a_replayed_pass_is_one_piece(folder: Path) -> None:
    with drafting(folder) as llm:
        runner = replaying_runtime.NEWEST[0]
        assert runner.extends.counts == COUNTS
        begun = runner.threads.replays
        llm.generate([prompts(0)[5]], ONE)
        assert runner.threads.replays - begun == 3 + 1, (
            "the target's pieces around two layers, and the draft's"
        )
        assert runner.extends.called[-1] == (7, True)


@pytest.mark.parametrize(
    "more", [{"on_failure": "eager"}, {"prefill": None}], ids=["as told", "not asked for"]
)
def test_a_failed_capture_is_reported(folder: Path, more: dict[str, Any], caplog: Any) -> None:
    with pytest.raises(
        CaptureError,
        match="the draft-extend graph of 8 tokens could not be captured: RuntimeError by",
    ):
        drafting(folder, {"breaks": "extend 8"})
    with drafting(folder, {"breaks": "extend 8", **more}) as llm:
        runner = replaying_runtime.NEWEST[0]
        assert runner.extends.counts == [4, 16, 32]
        assert "the draft-extend graph of 8 tokens could not be captured" in caplog.text
        llm.generate([prompts(0)[4]], ONE)
        assert runner.extends.called[-1] == (6, True)


def test_nothing_is_captured_without_drafts_or_prefill_graphs(folder: Path) -> None:
    with engine(folder) as llm:
        assert (
            llm.plan.sizes.extend_tokens == () and replaying_runtime.NEWEST[0].extends.counts == []
        )
        assert (
            runner_of(llm).draft_extend.work is None
            and runner_of(llm).draft_extend.replacement is None
        )
    with drafting(folder, {"prefill": False, "prefill_tokens": None}) as llm:
        assert (
            llm.plan.sizes.extend_tokens == () and runner_of(llm).draft_extend.replacement is None
        )
        llm.generate([[5, 6, 7]], ONE)
        draft_extend = runner_of(llm).draft_extend
    with drafting(folder) as llm:
        draft_extend = runner_of(llm).draft_extend
        assert draft_extend.replacement is replaying_runtime.NEWEST[0].extends
    assert draft_extend.replacement is None, "closed"


GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
TREES = {"use": "nextn", "adaptive": False, "steps": 3, "topk": 3, "draft_tokens": 8}


def watch_fills(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gains an element for each pass of a replayed step.

    The element is True if the pass is a part of a captured piece.
    """
    found: list[bool] = []
    running: list[str] = []
    fill, fused, run = ModelDrafts._fill, ModelDrafts._accept_chains, DecodeGraph.run

    def counted(self: Any, batch: Any, *rest: Any) -> None:
        if batch.pieces is not DIRECT:
            found.append(bool(running))
        fill(self, batch, *rest)

    def counted_chains(self: Any, logits: Any, hidden: Any, batch: Any, sampler: Any) -> Any:
        if batch.pieces is not DIRECT:
            found.append(bool(running))
        return fused(self, logits, hidden, batch, sampler)

    def named(self: Any, name: str, work: Any) -> Any:
        running.append(name)
        try:
            return run(self, name, work)
        finally:
            running.pop()

    monkeypatch.setattr(ModelDrafts, "_fill", counted)
    monkeypatch.setattr(ModelDrafts, "_accept_chains", counted_chains)
    monkeypatch.setattr(DecodeGraph, "run", named)
    return found


@pytest.mark.parametrize("drafts", [{}, {"speculative": TREES}], ids=["chains", "trees"])
def test_switched_off_it_runs_eagerly_after_a_replayed_step(
    folder: Path, drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, accepted drafts and the draft's cache stay the same."""
    found = []
    for captured in (True, False):
        graphs = {} if captured else {"draft_extend": False}
        with drafting(folder, graphs, cache={"use": "none"}, **drafts) as llm:
            runner = replaying_runtime.NEWEST[0]
            assert llm.plan.sizes.extend_tokens == (tuple(COUNTS) if captured else ())
            steps = len(runner.filled)
            with monkeypatch.context() as patched:
                inside = watch_fills(patched)
                done = llm.generate(prompts(3), GREEDY)
            assert set(inside) == {captured} and len(inside) == len(runner.filled) - steps
            counts = llm.stats.drafted_tokens, llm.stats.accepted_tokens
            found.append(([one.token_ids for one in done], counts, draft_cache(llm)))
    (tokens, counts, cached), (own_tokens, own_counts, own) = found
    assert own_tokens == tokens and own_counts == counts
    for one, other in zip(own, cached, strict=True):
        assert one.any() and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
