"""Steps with prompts whose sizes are between the captured and the largest ones are tried before any
request.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.engine.in_flight import InFlight
from glowplug.core.engine.runner import Runner
from glowplug.core.plan.plan import Sizes
from glowplug.core.plugin.byte_costs import ROUND_TOKENS
from glowplug.core.plugin.offers import Mode
from glowplug.core.startup.first_use.steps_between import (
    STEPS_BETWEEN,
    counts_between,
    rows_beside,
    steps_between,
)
from glowplug.core.step.batch import Batch
from tests.support.tiny import write_config

PROMPTS = [[5, 6, 7], [8, 9], [1] * 40]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def sizes() -> Sizes:
    return Sizes(
        context_length=4096,
        max_running=64,
        max_queued=64,
        max_step_tokens=8192 + 64,
        chunk_size=8192,
        page_size=64,
        num_pages=64,
        kv_bytes=0,
    )


@pytest.mark.parametrize("chunk", [1536, 8192, 16384])
@pytest.mark.parametrize("least", [0, 1536])
@pytest.mark.parametrize(("rows", "width"), [(64, 1), (64, 3), (1, 1)])
def test_round_numbers_are_all_tried(
    chunk: int, least: int, rows: int, width: int, sizes: Sizes
) -> None:
    sizes = replace(
        sizes,
        max_running=rows,
        max_step_tokens=chunk + 64,
        chunk_size=chunk,
        width=width,
        pass_tokens=(least,) if least else (),
    )
    found = counts_between(sizes)
    tokens = [count for _, count in found]
    assert set(range(least + ROUND_TOKENS, chunk, ROUND_TOKENS)) <= set(
        tokens
    ) and tokens == sorted(set(tokens))
    most = min(STEPS_BETWEEN, rows - 1)
    assert {count % 2 for count in tokens} == {0, 1} or rows == 1 or chunk - least < STEPS_BETWEEN
    assert [decodes for decodes, _ in found] == [min(at + 1, most) for at in range(len(found))]


def test_the_last_layer_of_captured_steps_is_tried_too(sizes: Sizes) -> None:
    """Several ranks capture steps of whole chunks, but without the last layer."""
    found = counts_between(replace(sizes, pass_tokens=(16, 1536, 8192, 8256)))
    tokens = [count for _, count in found]
    assert set(range(2048 + ROUND_TOKENS, 8192, ROUND_TOKENS)) <= set(tokens)
    assert min(tokens) >= 2048 and max(tokens) <= 8192


def tiny(tmp_path: Path, rows: int, chunk: int) -> LLM:
    return LLM(
        model=str(write_config(tmp_path, "v3")),
        weights={"use": "random"},
        device="cpu",
        skip_tokenizer=True,
        memory={"kv_tokens": 2048},
        context_length=128,
        scheduler={"max_running_requests": rows, "chunk_size": chunk},
    )


@pytest.mark.parametrize(
    ("rows", "passes", "chunk"), [(64, (), 256), (64, (16, 64), 256), (5, (), 256), (1, (), 1100)]
)
def test_warm_up_steps_reach_every_number_and_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, passes: tuple[int, ...], chunk: int
) -> None:
    with tiny(tmp_path, rows, chunk) as llm:
        runner = llm._executor._engine.runner  # type: ignore[attr-defined]
        before = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
        tried: list[Batch] = []
        launch = Runner.launch

        def watch(self: Runner, batch: Batch) -> InFlight:
            tried.append(batch)
            return launch(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(Runner, "launch", watch)
            steps_between(
                runner, replace(llm.plan, sizes=replace(llm.plan.sizes, pass_tokens=passes))
            )
        assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == before
    many = [batch for batch in tried if batch.num_decodes > STEPS_BETWEEN]
    assert [batch.num_decodes for batch in many] == ([32] if rows == 64 else [])
    assert all((batch.kv_lens[: batch.num_decodes] == 128).all() for batch in many)
    tried = tried[: len(tried) - len(many)]
    tried.reverse()  # the largest comes first
    tokens = [batch.num_tokens for batch in tried]
    assert tokens == sorted(tokens) and tokens[-1] <= 256 + 64
    assert {batch.mode for batch in tried} == {Mode.PREFILL}
    assert all(not batch.samples[batch.num_decodes :].any() for batch in tried)
    if rows == 64:
        assert [batch.num_decodes for batch in tried][-1] == STEPS_BETWEEN
        assert {count % 16 == 0 for count in tokens} == {True, False} and {
            count % 2 for count in tokens
        } == {0, 1}
        assert min(tokens) > (passes[-1] - 16 if passes else 0)
        assert max(later - earlier for earlier, later in zip(tokens, tokens[1:])) <= 32


DRAFTS = [
    {"use": "nextn", "steps": 1, "adaptive": False},
    {"use": "nextn", "steps": 3},
    {"use": "nextn", "steps": 3, "topk": 2, "draft_tokens": 6},
    {"use": "ngram", "draft_tokens": 4},
]


@pytest.mark.parametrize("drafts", DRAFTS, ids=lambda one: "-".join(map(str, one.values())))
def test_each_size_of_the_drafts_runs_beside_prompts(
    tmp_path: Path, drafts: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verify step beside a prompt needs variants of kernels that no other step compiles."""
    sizes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    with LLM(
        str(write_config(tmp_path, "v3", **sizes)),
        weights={"use": "random"},
        skip_tokenizer=True,
        device="cpu",
        speculative=drafts,
        context_length=128,
        memory={"kv_tokens": 4096},
        scheduler={"max_running_requests": 40, "chunk_size": 512},
    ) as llm:
        runner = llm._executor._engine.runner  # type: ignore[attr-defined]
        before = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
        tried: list[Batch] = []
        launch = Runner.launch

        def watch(self: Runner, batch: Batch) -> InFlight:
            tried.append(batch)
            return launch(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(Runner, "launch", watch)
            steps_between(runner, llm.plan)
        assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == before
        planned = llm.plan.sizes
    beside = {
        (batch.draft_shape or planned.draft_shape, batch.num_decodes)
        for batch in tried
        if batch.num_decodes and len(batch.rows) > batch.num_decodes
    }
    assert rows_beside(planned) == [*range(1, 25), 32]
    wanted = {(shape, rows) for shape in planned.step_shapes for rows in rows_beside(planned)}
    assert wanted <= beside
    assert all(batch.num_tokens <= planned.max_step_tokens for batch in tried)
    assert max(int(batch.kv_lens.max()) for batch in tried) <= planned.context_length
