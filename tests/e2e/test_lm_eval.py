"""lm_eval's two clients against the server: the same log-probabilities and texts as the engine's.

lm_eval takes 600 MB of packages, so the test environment does not have it: the requests that it
sent in a recorded run are replayed. With ``pip install lm_eval[api]`` it runs for real too.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug import LLM
from glowplug.entrypoints.bench.load.local_server import LocalServer
from tests.support.lm_eval_run import (
    CONFIG,
    MODES,
    RECORDED,
    TOLERANCE,
    Direct,
    compared,
    evaluate,
    offline,
    write_tasks,
)
from tests.support.source_tree import ROOT
from tests.support.waiting import LIMIT

REQUESTS = [
    (title, number)
    for title, bodies in json.loads(RECORDED.read_text())["modes"].items()
    for number in range(len(bodies))
]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(CONFIG, threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    with LLM(**CONFIG) as llm:
        yield Direct(llm)


def post(server: LocalServer, route: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(server.base_url + route, json=body, timeout=LIMIT)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def prompts_of(body: dict[str, Any]) -> list[Any]:
    """Return the prompts of a request as a list of texts or lists of ids."""
    prompt = body["prompt"]
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def check_scores(server: LocalServer, direct: Direct, body: dict[str, Any]) -> None:
    """Compare an echo request's log-probabilities with the engine's, as lm_eval reads them."""
    choices = post(server, "/v1/completions", body)["choices"]
    prompts = prompts_of(body)
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    for choice, prompt in zip(choices, prompts, strict=True):
        scores = choice["logprobs"]["token_logprobs"]
        own = direct.scores(prompt)
        assert scores[0] is None, "the first token has none"
        echoed = scores[1:] if body["max_tokens"] == 0 else scores[1:-1]
        assert len(echoed) == len(own)
        assert max(abs(a - b) for a, b in zip(echoed, own, strict=True)) < TOLERANCE
        tops = choice["logprobs"]["top_logprobs"]
        assert len(tops) == len(scores)
        for score, top in zip(scores[1:], tops[1:], strict=True):
            assert score <= max(top.values()), "a token is greedy if it equals the best one"


@pytest.mark.parametrize(("title", "number"), REQUESTS)
def test_recorded_requests_get_the_engines_results(
    title: str, number: int, server: LocalServer, direct: Direct
) -> None:
    body = json.loads(RECORDED.read_text())["modes"][title][number]
    if body.get("echo"):
        check_scores(server, direct, body)
        check_scores(server, direct, {**body, "max_tokens": 0})
        return
    if "messages" not in body:
        choices = post(server, "/v1/completions", body)["choices"]
        for choice, prompt in zip(choices, prompts_of(body), strict=True):
            assert choice["text"] == direct.completion(prompt, body["max_tokens"], body["stop"])
        return
    text, scores = direct.chat(body["messages"], body["max_tokens"], body["stop"])
    plain = post(server, "/v1/chat/completions", body)["choices"][0]
    assert plain["message"]["content"] == text and plain["logprobs"] is None
    scored = {**body, "logprobs": True, "top_logprobs": 1}
    found = post(server, "/v1/chat/completions", scored)["choices"][0]["logprobs"]["content"]
    assert len(found) == len(scores.token)
    for one, token, best in zip(found, scores.token, scores.top, strict=True):
        assert abs(one["logprob"] - token) < TOLERANCE
        assert abs(one["top_logprobs"][0]["logprob"] - best[0]) < TOLERANCE


def test_every_kind_of_request_was_recorded() -> None:
    modes = json.loads(RECORDED.read_text())["modes"]
    bodies = [body for found in modes.values() for body in found]
    echoed = [body for body in bodies if body.get("echo")]
    assert any(isinstance(body["prompt"], str) for body in echoed)
    assert any(len(body["prompt"]) == 3 and body["prompt"][0][0] >= 0 for body in echoed)
    assert any("stop" in body and "prompt" in body for body in bodies)
    assert any("messages" in body for body in bodies)
    assert modes.keys() == MODES.keys()


def test_the_recorded_run_is_within_the_bar() -> None:
    record = json.loads((ROOT / "docs" / "benchmarks" / "lm-eval.json").read_text())
    assert record["modes"].keys() == MODES.keys()
    for line in record["modes"].values():
        assert line["largest_difference"] < TOLERANCE and line["different_texts"] == 0
    assert sum(line["loglikelihoods"] for line in record["modes"].values()) >= 50
    assert record["modes"]["chat"]["results"]["glowplug_generate"]["exact_match,none"] == 1.0


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="pip install lm_eval[api] to run it"
)
@pytest.mark.parametrize("title", MODES)
def test_lm_eval_computes_the_engines_results(
    title: str, server: LocalServer, direct: Direct, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    with offline(tmp_path / "cache"):
        found = compared(MODES[title], evaluate(MODES[title], server.base_url, tmp_path), direct)
    assert found["largest_difference"] < TOLERANCE
    assert found["generated"] == 12 and found["different_texts"] == 0
    if not MODES[title].chat:
        assert found["loglikelihoods"] >= 36
