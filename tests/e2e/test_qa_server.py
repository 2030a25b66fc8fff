"""Requests that can never fit and routes that do not exist, as met by a user of the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e import serving
from tests.e2e.fake_engine import make_plan
from tests.e2e.serving import HTTP, Served, served

CHAT = {"messages": [{"role": "user", "content": "say:hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server with room for two running sequences and three waiting ones."""

    def small(**config: Any) -> Any:
        plan = make_plan(**config)
        return replace(plan, sizes=replace(plan.sizes, max_running=2, max_queued=3))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "make_plan", small)
        with served() as one:
            yield one


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 6}),
        ("/v1/completions", {"prompt": ["say:a"] * 3, "n": 2}),
        ("/generate", {"text": ["say:a"] * 6}),
    ],
)
def test_more_choices_than_the_queue_holds_are_refused_for_good(
    server: Served, path: str, body: Any
) -> None:
    """Status 429 would make the client try again for ever."""
    answer = HTTP.post(server.url + path, json=body)
    assert answer.status_code == 400 and "at most 5" in answer.json()["error"]["message"]
    assert (
        len(HTTP.post(server.url + "/v1/chat/completions", json={**CHAT, "n": 5}).json()["choices"])
        == 5
    )
    server.wait_idle()


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "//v1/models", "/a/b/c"])
def test_a_missing_route_is_named(server: Served, path: str) -> None:
    answer = HTTP.post(server.url + path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"no such route: POST {path.strip('/')}"
