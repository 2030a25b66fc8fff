"""Wrong input to the offline engine: each is a RequestError and the engine continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import EngineDead, RequestError
from tests.e2e.fake_engine import TEMPLATE, VOCAB, make_tokenizer
from tests.support.tiny import write_config

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_config(tmp_path_factory.mktemp("offline"), "v3", vocab_size=VOCAB)
    make_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": "<bos>", "eos_token": "<eos>"})
    )
    with LLM(model=str(folder), weights={"use": "random"}) as one:
        yield one
        state = one.control("check")
        assert state["running"] == 0 and state["free"] + state["cached"] == state["total"]


BAD_PROMPTS: list[Any] = [
    None,
    5,
    b"ab",
    {"a": 1},
    [None],
    [1.5],
    [True],
    [1, "a"],
    [[1, None]],
    [[1, 2.0]],
    [[1, [2]]],
    [[]],
    [[-1]],
    [[VOCAB]],
    [[2**70]],
    "\ud800",
    [["a"]],
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda value: ascii(value)[:24])
def test_a_bad_prompt_costs_only_itself(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, GREEDY)
    assert len(llm.generate("next", GREEDY)[0].token_ids) == 6


def test_ids_may_be_arrays_and_tuples(llm: LLM) -> None:
    expected = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    for prompt in (
        [5, 6, 7],
        (5, 6, 7),
        [(5, 6, 7)],
        np.array([5, 6, 7]),
        np.array([[5, 6, 7]]),
        [[np.int64(5), np.int32(6), 7]],
        range(5, 8),
    ):
        assert [one.token_ids for one in llm.generate(prompt, GREEDY)] == [expected]
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 3.5},
        {"max_tokens": True},
        {"max_tokens": "x"},
        {"n": 2.0},
        {"top_k": 1.5},
        {"seed": 1.0},
        {"stop": 5},
        {"stop": [5]},
        {"stop": [b"x"]},
        {"stop_token_ids": 5},
        {"stop_token_ids": [1.0]},
        {"logit_bias": [1]},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": {1: "x"}},
        {"allowed_token_ids": ["a"]},
        {"ignore_eos": 1},
        {"temperature": True},
        {"temperature": None},
        {"top_p": "x"},
        {"min_tokens": None},
        {"repetition_penalty": "x"},
        {"logprobs": 1.0},
    ],
    ids=str,
)
def test_parameters_of_a_wrong_type_name_the_field(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param in fields and str(caught.value).startswith(str(caught.value.param))


def test_numpy_numbers_are_numbers(llm: LLM) -> None:
    params = SamplingParams(temperature=np.float64(0.0), top_p=np.float64(0.5), max_tokens=2)
    assert len(llm.generate("a", params)) == 1


@pytest.mark.parametrize("params", [5, "x", {"max_tokens": 2}, [{"max_tokens": 2}], []], ids=str)
def test_objects_other_than_sampling_params_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate(["a"], params)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hi",
        [[]],
        [{}],
        [["x"]],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
    ids=str,
)
def test_a_bad_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, GREEDY)


def test_content_parts_are_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    joined, plain = llm.chat(
        [[{"role": "user", "content": parts}], [{"role": "user", "content": "hello"}]], GREEDY
    )
    assert joined.prompt_token_ids == plain.prompt_token_ids


def test_streams_side_by_side_lose_nothing(llm: LLM) -> None:
    """Two streams, a batch, a polled sequence and a query of the engine share its frames."""
    alone = [one.token_ids for one in llm.generate(["one", "two", "three"], GREEDY)]
    polled = llm.submit("three", GREEDY)
    got: list[list[int]] = [[], []]
    for pair in zip_longest(llm.stream("one", GREEDY), llm.stream("two", GREEDY)):
        for ids, delta in zip(got, pair):
            ids.extend(delta.token_ids if delta else [])
        assert llm.generate("one", GREEDY)[0].token_ids == alone[0]
        llm.control("info")
    assert got == alone[:2]
    ids: list[int] = []
    while not (polled.done and len(ids) == 6):
        ids += [
            token for stream, delta in llm.poll() if stream is polled for token in delta.token_ids
        ]
    assert ids == alone[2]


def test_a_stream_closed_early_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream("x" * 40, SamplingParams(max_tokens=300, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.generate("y", GREEDY)
    assert llm.control("check")["running"] == 0


def test_after_close_every_call_reports_it(tmp_path: Path) -> None:
    one = LLM(
        model=str(write_config(tmp_path, "v3")), weights={"use": "random"}, skip_tokenizer=True
    )
    stream = one.stream([1, 2], SamplingParams(max_tokens=200))
    next(stream)
    for bad in (
        lambda: one.generate("text"),
        lambda: one.chat([{"role": "user", "content": "x"}]),
        lambda: one.generate([[1]], SamplingParams(stop="x")),
    ):
        with pytest.raises(RequestError, match="tokenizer"):
            bad()
    one.close()
    one.close()
    for late in (
        lambda: one.generate([[1]]),
        lambda: one.control("info"),
        one.poll,
        lambda: list(stream),
    ):
        with pytest.raises(EngineDead, match="closed"):
            late()


@pytest.mark.parametrize("name", ["GLOWPLUG_PROFILE_DIR", "SGLANG_TORCH_PROFILER_DIR"])
def test_traces_go_to_the_folder_of_the_environment(
    llm: LLM, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(tmp_path / "traces"))
    llm.control("profile_start", label="qa")
    llm.generate("x", GREEDY)
    trace = tmp_path / "traces" / llm.control("profile_stop")["file"]
    assert json.loads(trace.read_text())["traceEvents"]
    with pytest.raises(RequestError, match="label"):
        llm.control("profile_start", label="../../etc/x")
