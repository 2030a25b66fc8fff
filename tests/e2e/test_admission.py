"""A request is checked once, and its admission reaches the engine's sequences unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.step.messages import Submit, decode_inbound, encode
from glowplug.core.step.request import Admission, Sequence
from glowplug.entrypoints.front.front import Front
from tests.e2e.serving import Served, served
from tests.support.tiny import write_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
FIELDS = {"priority": -3, "cache_salt": "warm"}
#: route -> a body with three sequences of one prompt
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 3,
        "n": 3,
    },
    "/v1/completions": {"prompt": "one", "max_tokens": 3, "n": 3},
    "/generate": {"text": "one", "sampling_params": {"max_new_tokens": 3, "n": 3}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(server={"request_timeout": 90.0, "queue_timeout": 7.0}) as one:
        yield one


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts whose token ids are checked from now on, in order."""
    prompts: list[list[int]] = []
    check = Front._ids

    def noted(front: Front, prompt: list[int]) -> Any:
        prompts.append(prompt)
        return check(front, prompt)

    monkeypatch.setattr(Front, "_ids", noted)
    return prompts


@pytest.mark.parametrize("route", BODIES)
def test_an_admission_reaches_every_sequence_of_a_request(server: Served, route: str) -> None:
    server.executor.admissions.clear()
    answer = httpx.post(
        server.url + route, json=BODIES[route] | FIELDS, headers={"X-Request-Timeout": "5"}
    )
    assert answer.status_code == 200, answer.text
    assert server.executor.admissions == [Admission(-3, "warm", 5.0, 7.0)] * 3


@pytest.mark.parametrize("route", BODIES)
def test_a_prompt_of_several_sequences_is_checked_once(
    server: Served, checked: list[list[int]], route: str
) -> None:
    assert httpx.post(server.url + route, json=BODIES[route]).status_code == 200
    assert len(checked) == 1


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_config(tmp_path_factory.mktemp("admission"), "v3")
    with LLM(str(folder), weights={"use": "random"}, device="cpu", skip_tokenizer=True) as one:
        yield one


def test_a_prompt_in_python_is_checked_once(llm: LLM, checked: list[list[int]]) -> None:
    done = llm.generate([[5, 6, 7], [8, 9]], [GREEDY.replace(n=2), GREEDY])
    assert [len(one.choices) for one in done] == [2, 1] and len(checked) == 2


def test_seeds_of_choices_count_up_from_the_given_one(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.0, seed=11, max_tokens=6, ignore_eos=True)
    (both,) = llm.generate([[5, 6, 7]], drawn.replace(n=2))
    alone = llm.generate([[5, 6, 7]] * 2, [drawn, drawn.replace(seed=12)])
    assert [one.token_ids for one in both.choices] == [one.token_ids for one in alone]


def test_an_admission_reaches_the_engines_sequence(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm._executor._engine  # type: ignore[attr-defined]
    added: list[Sequence] = []
    add = engine.scheduler.add
    monkeypatch.setattr(engine.scheduler, "add", lambda one: (added.append(one), add(one)))
    given = Admission(priority=4, salt="s", timeout=60.0, queue_timeout=30.0)
    stream, message = llm._front.submit(llm._front.check([5, 6], GREEDY), given)
    llm._executor.submit(encode([message]))
    while not stream.done:
        llm.poll()
    assert [(one.id, one.admission) for one in added] == [(stream.id, given)]


def test_prompts_of_one_call_reach_the_engine_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first message has as many as the engine admits, and others follow as room is made."""
    with LLM(
        model=str(write_config(tmp_path, "v3")),
        weights={"use": "random"},
        skip_tokenizer=True,
        scheduler={"max_running_requests": 3, "max_queued_requests": 2},
    ) as llm:
        frames: list[int] = []
        submit = llm._executor.submit

        def noted(frame: bytes) -> None:
            frames.append(sum(isinstance(one, Submit) for one in decode_inbound(frame)))
            submit(frame)

        monkeypatch.setattr(llm._executor, "submit", noted)
        prompts = [[5 + number] * 4 for number in range(9)]
        found = llm.generate(prompts, GREEDY)
        assert [len(one.token_ids) for one in found] == [3] * 9
        assert [one.prompt_token_ids for one in found] == prompts
        assert frames[0] == 5 and sum(frames) == 9
