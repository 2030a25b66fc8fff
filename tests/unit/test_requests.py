"""Fields of a request: each sampling parameter at its bounds and beyond, and token ids on their way
to the engine.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from glowplug.core.errors import RequestError
from glowplug.core.plan.resolve import plan
from glowplug.core.step.messages import Submit, decode_inbound, encode, packed_ids
from glowplug.core.step.request import MAX_LOGPROBS, MAX_N, SamplingParams
from glowplug.core.step.structured import GrammarSpec, StructuredOutputsParams
from glowplug.entrypoints.front.front import Front

GOOD: dict[str, list[Any]] = {
    "n": [1, MAX_N],
    "max_tokens": [1, 1 << 31, None],
    "min_tokens": [0, 16],
    "temperature": [0, 0.0, 100.0],
    "top_p": [1e-9, 1, 1.0],
    "top_k": [-1, 0, 1 << 31],
    "min_p": [0.0, 1.0],
    "presence_penalty": [-2.0, 2],
    "frequency_penalty": [-2, 2.0],
    "repetition_penalty": [0.01, 100.0],
    "logit_bias": [None, {}, {3: -100.0, 4: 100}],
    "allowed_token_ids": [None, [0, 5]],
    "seed": [None, -(1 << 63), (1 << 64) - 1],
    "stop": ["a", [], ["a", "b"] * 8],
    "stop_token_ids": [[], [7] * 256],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, MAX_LOGPROBS],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "grammar": [None, GrammarSpec("regex", "a")],
    **dict.fromkeys(
        ("structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"), [None]
    ),
    "ext": [{}, {"deadline": 1.5}],
}
BAD: dict[str, list[Any]] = {
    "n": [0, MAX_N + 1, True, 1.0, None],
    "max_tokens": [0, (1 << 31) + 1, 2.0, True, "3"],
    "min_tokens": [-1, 17, None, 1.5],
    "temperature": [-0.1, 101, math.nan, math.inf, True, "1", None],
    "top_p": [0, 0.0, 1.1, -1.0, math.nan],
    "top_k": [-2, 1.0, True, None],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1, None],
    "frequency_penalty": [-2.1, 2.1, "0"],
    "repetition_penalty": [0, 0.0, 5e-324, 0.0099, 101.0, -math.inf],
    "logit_bias": [[1], {3: 101.0}, {3: -101}, {-1: 1.0}, {"3": 1.0}, {3: None}, {3: True}],
    "allowed_token_ids": [[], ["a"], [1.0], 5],
    "seed": [-(1 << 63) - 1, 1 << 64, 1.0, True],
    "stop": [None, [1], [""], ["a"] * 17, ["x" * 1025], ("a",)],
    "stop_token_ids": [None, [7] * 257, [7.0], [True]],
    "ignore_eos": [1, 0, None, "yes"],
    "logprobs": [-1, MAX_LOGPROBS + 1, True, 1.0],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, False],
    "skip_special_tokens": [None, 1],
    "include_stop_str_in_output": [None, 0],
    "grammar": ["a"],
    "structured_outputs": [5, StructuredOutputsParams()],
    "json_schema": ["{", 5, [], "5"],
    "regex": ["", 5, "\0"],
    "ebnf": ["", 5, "\ud800"],
    "structural_tag": ["[]", 5],
    "ext": [1, "a", []],
}


def test_every_field_has_a_case() -> None:
    assert set(GOOD) == set(BAD) == {field.name for field in msgspec.structs.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD.items() for value in values]
)
def test_values_at_their_bounds_are_accepted(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == (
        [value] if name == "stop" and isinstance(value, str) else value
    )
    [found] = decode_inbound(encode([Submit(1, b"", params)]))
    assert isinstance(found, Submit) and found.params == params


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_values_beyond_their_bounds_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    with pytest.raises(RequestError, match=name):
        SamplingParams().replace(**{name: value})


def test_an_array_librarys_numbers_become_plain_ones() -> None:
    params = SamplingParams(temperature=np.float64(0.5), top_p=np.float64(0.25))
    assert type(params.temperature) is type(params.top_p) is float
    with pytest.raises(RequestError, match="top_k"):
        SamplingParams(top_k=np.int64(3))


@pytest.mark.parametrize("count", [1, 4, 1001])
def test_token_ids_arrive(count: int) -> None:
    ids = np.random.default_rng(count).integers(0, 129280, count)
    [found] = decode_inbound(encode([Submit(1, packed_ids(ids.tolist()), SamplingParams())]))
    assert isinstance(found, Submit) and found.prompt_ids.tolist() == ids.tolist()
    assert found.prompt_ids.dtype == np.int32 and found.prompt_ids.flags.writeable


@pytest.mark.parametrize("wrong", [-1, 2048, 1 << 31, 1 << 32, 1 << 63, -(1 << 70)])
def test_an_id_past_the_vocabulary_is_named(wrong: int) -> None:
    front = Front(plan({"model": "embedded"}), None, ())
    assert front.plan.facts.model.vocab_size == 2048
    with pytest.raises(
        RequestError, match=f"token id {wrong} is outside the model's vocabulary of 2048"
    ) as caught:
        front.check([5, wrong, 6], SamplingParams())
    assert caught.value.code == "invalid_token_id" and not front.streams
    _, message = front.submit(front.check([0, 2047], SamplingParams()))
    assert message.prompt_ids.tolist() == [0, 2047]
