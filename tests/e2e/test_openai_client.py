"""openai-python, unchanged, against a real HTTP server: chat, streams, completions,
log-probabilities, models.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glowplug.core.protocols import Worker
from glowplug.core.step.request import Admission
from glowplug.plugins.outputs.deepseek_r1 import DeepseekR1Options
from glowplug.plugins.outputs.deepseek_r1_runtime import DeepseekR1
from tests.e2e.fake_engine import TEXT, make_plan
from tests.e2e.serving import Served, served

openai = pytest.importorskip(
    "openai", reason="the client that is tested comes with the extra `test`"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=20
    ) as one:
        yield one


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say:{text}"}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}]
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1
    assert answer.usage.prompt_tokens == len("hello") + 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_has_the_same_text_and_the_usage_last(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=say("zwölf 🗼"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "zwölf 🗼"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 2
    ) + ["stop"]
    assert chunks[-2].choices[0].delta.content is None
    assert (
        chunks[-1].choices == []
        and chunks[-1].usage.completion_tokens == len("zwölf 🗼".encode()) + 1
    )
    assert len({chunk.id for chunk in chunks}) == 1


def test_continuous_usage_counts_up(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=say("abcd"),
        stream=True,
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts) and counts[-1] == 5 and len(set(counts)) == 5


def test_n_choices_each_have_their_own_index(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=say("three"), n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"three"}
    assert (
        answer.usage.completion_tokens == 3 * 6
        and answer.usage.prompt_tokens == len("say:three") + 3
    )


def test_choices_of_a_stream_are_distinguished_by_index(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(
        model="fake", messages=say("both"), n=2, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "both", 1: "both"}


def test_seeds_count_up_over_choices(server: Served, client: openai.OpenAI) -> None:
    server.executor.params.clear()
    client.chat.completions.create(
        model="fake", messages=say("x"), n=3, seed=41, temperature=0.5, top_p=0.9
    )
    assert sorted(params.seed for params in server.executor.params) == [41, 42, 43]
    assert {(params.temperature, params.top_p) for params in server.executor.params} == {(0.5, 0.9)}


def test_stop_string_is_cut_and_named(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=say("one two three"), stop=["three", " tw"]
    )
    assert answer.choices[0].message.content == "one"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == answer.choices[0].matched_stop == " tw"


def test_eos_is_no_stop_reason(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model="fake", messages=say("end")).choices[0]
    assert choice.stop_reason is None and choice.matched_stop == 257


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="fake", messages=say("abcdef"), **{name: 3})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
            "abc",
            "length",
        )


def test_chat_logprobs_carry_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=say("hé"), logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["h", r"bytes:\xc3", r"bytes:\xa9", "<eos>"]
    assert bytes(byte for entry in content[:3] for byte in entry.bytes).decode() == "hé"
    assert all(
        len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token
        for entry in content
    )


def test_streamed_logprobs_equal_whole_ones(client: openai.OpenAI) -> None:
    request = {"model": "fake", "messages": say("hé!"), "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**request).choices[0].logprobs.content
    pieces = [
        entry
        for chunk in client.chat.completions.create(**request, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert pieces == whole


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="say:plain text", max_tokens=100)
    assert answer.choices[0].text == "plain text" and answer.object == "text_completion"
    default = client.completions.create(model="fake", prompt="tell me")
    assert default.usage.completion_tokens == 16 and default.choices[0].finish_reason == "length"


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["say:a", "say:b"], n=2, max_tokens=9)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a"),
        (1, "a"),
        (2, "b"),
        (3, "b"),
    ]
    assert answer.usage.prompt_tokens == 10
    ids = client.completions.create(
        model="fake", prompt=[list(b"say:c"), list(b"say:d")], max_tokens=9
    )
    assert [choice.text for choice in ids.choices] == ["c", "d"]


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    """This is the request of lm-eval's local-completions: the prompt's own log-probabilities, with
    and without a further token.
    """
    ids = list(b"say:hi")
    for max_tokens, more in ((0, ""), (1, "h")):
        choice = client.completions.create(
            model="fake", prompt=ids, max_tokens=max_tokens, echo=True, logprobs=1
        ).choices[0]
        assert choice.text == "say:hi" + more
        assert choice.logprobs.tokens == list("say:hi" + more)
        assert (
            choice.logprobs.token_logprobs[0] is None
            and None not in choice.logprobs.token_logprobs[1:]
        )
        assert choice.logprobs.text_offset == list(range(len("say:hi" + more)))
        assert choice.logprobs.top_logprobs[1] == {"a": choice.logprobs.token_logprobs[1]}


def test_streamed_completion_with_echo(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake", prompt="say:tail", max_tokens=9, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "say:tailtail"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").max_model_len == 4096
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="fake", messages=say("x"), temperature=-1)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=say("x"))
    assert unknown.value.code == "model_not_found"


def test_token_ids_in_and_out(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=say("ab"),
        extra_body={"return_token_ids": True, "input_ids": [256, *b"say:xy"]},
    )
    assert answer.choices[0].token_ids == [120, 121, 257] and answer.prompt_token_ids == [
        256,
        *b"say:xy",
    ]
    named = client.chat.completions.create(
        model="fake",
        messages=say("ab"),
        logprobs=True,
        extra_body={"return_tokens_as_token_ids": True},
    )
    tokens = [entry.token for entry in named.choices[0].logprobs.content]
    assert tokens == ["token_id:97", "token_id:98", "token_id:257"]


def test_engine_fields_reach_the_engine(server: Served, client: openai.OpenAI) -> None:
    server.executor.params.clear()
    client.chat.completions.create(
        model="fake",
        messages=say("x"),
        max_tokens=7,
        logit_bias={"65": 5},
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "priority": -3,
            "cache_salt": "warm",
            "skip_special_tokens": False,
            "allowed_token_ids": [65, 66],
        },
    )
    params = server.executor.params[0]
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (
        3,
        0.1,
        1.5,
        2,
    )
    assert params.ignore_eos and params.stop_token_ids == [9] and params.logit_bias == {65: 5.0}
    assert params.allowed_token_ids == [65, 66] and not params.skip_special_tokens
    assert server.executor.admissions[-1] == Admission(priority=-3, salt="warm")


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    messages = say("a prompt that is longer than one page of sixteen tokens")
    answer = client.chat.completions.create(
        model="fake", messages=messages, extra_body={"cache_salt": "warm"}
    )
    assert (
        answer.usage.prompt_tokens_details.cached_tokens
        == answer.usage.prompt_tokens // 16 * 16
        > 0
    )


def test_continue_final_message(client: openai.OpenAI) -> None:
    messages = [
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "say:and so on"},
    ]
    request = {
        "model": "fake",
        "messages": messages,
        "extra_body": {"continue_final_message": True, "echo": True},
    }
    answer = client.chat.completions.create(**request)
    assert answer.choices[0].message.content == "say:and so onand so on"
    assert answer.usage.prompt_tokens == 1 + 1 + len("go on") + 1 + len("say:and so on")


@pytest.fixture(scope="module")
def thinker() -> Iterator[openai.OpenAI]:
    """A server whose plan chose the R1 reasoning parser."""
    parser = DeepseekR1(DeepseekR1Options(use="deepseek_r1"), make_plan(), Worker())
    with (
        served(parsers=[parser]) as one,
        openai.OpenAI(
            base_url=one.url + "/v1", api_key="unused", max_retries=0, timeout=20
        ) as client,
    ):
        yield client


THOUGHT = say("<think>two and two</think>four")


def test_reasoning_has_its_own_field(thinker: openai.OpenAI) -> None:
    answer = thinker.chat.completions.create(model="fake", messages=THOUGHT)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.reasoning, message.content) == (
        "two and two",
        "two and two",
        "four",
    )
    details = answer.usage.completion_tokens_details
    assert len("two and two") <= details.reasoning_tokens <= len("<think>two and two</think>") + 1


def test_streamed_reasoning_equals_whole(thinker: openai.OpenAI) -> None:
    for stream_reasoning in (True, False):
        reasoning = content = ""
        pieces = 0
        for chunk in thinker.chat.completions.create(
            model="fake",
            messages=THOUGHT,
            stream=True,
            extra_body={"stream_reasoning": stream_reasoning},
        ):
            delta = chunk.choices[0].delta
            piece = getattr(delta, "reasoning_content", None) or ""
            assert piece == (getattr(delta, "reasoning", None) or "")
            assert not (piece and content), "reasoning comes before content"
            pieces += bool(piece)
            reasoning, content = reasoning + piece, content + (delta.content or "")
        assert (reasoning, content) == ("two and two", "four")
        assert (pieces > 1) is stream_reasoning


def test_reasoning_can_stay_or_go(thinker: openai.OpenAI) -> None:
    together = thinker.chat.completions.create(
        model="fake", messages=THOUGHT, extra_body={"separate_reasoning": False}
    )
    assert together.choices[0].message.content == "<think>two and two</think>four"
    without = thinker.chat.completions.create(
        model="fake", messages=THOUGHT, extra_body={"include_reasoning": False}
    )
    assert (without.choices[0].message.content, without.choices[0].message.reasoning_content) == (
        "four",
        None,
    )


def test_thinking_reaches_the_template(thinker: openai.OpenAI) -> None:
    """The template then opens the block itself, so the answer starts inside it."""
    for extra in ({"chat_template_kwargs": {"thinking": True}}, {"reasoning_effort": "high"}):
        answer = thinker.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=4,
            extra_body=extra,
        )
        assert answer.choices[0].message.content == ""
        assert answer.choices[0].message.reasoning_content == TEXT[:3] == "Grü"
