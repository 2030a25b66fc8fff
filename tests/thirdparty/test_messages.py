"""The sample chat route of a third party over the engine's handle, and its command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.core.api import PluginLoadError, hookimpl
from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.cli.main import main
from tests.e2e.serving import HTTP, Served, served
from tests.support.event_order import events_of, message_of
from tests.thirdparty.packages import FOLDER, MOST_LINES, lines_of, private_imports

NAME = "glowplug-messages"
PLUGIN = "glowplug_messages.plugin"
KEY = "client-key"


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / NAME / "src"))
        yield


@pytest.fixture(scope="module")
def server(_package: None) -> Iterator[Served]:
    plugins = load_plugins(extra=[PLUGIN], entry_points=False)
    with served(plugins=plugins, server={"api_key": KEY}) as one:
        yield one


def post(server: Served, path: str = "/messages", **body: Any) -> httpx.Response:
    given = {"messages": [{"role": "user", "content": "say:hé"}], "max_tokens": 100, **body}
    return HTTP.post(server.url + path, json=given, headers={"Authorization": f"Bearer {KEY}"})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 2},
        {"system": "Be brief."},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ],
    ids=["text", "cut", "system", "continued"],
)
def test_an_answer_is_that_of_the_servers_own_route(server: Served, body: dict[str, Any]) -> None:
    found, wanted = (post(server, path, **body).json() for path in ("/messages", "/v1/messages"))
    for field in ("type", "role", "content", "stop_reason"):
        assert found[field] == wanted[field]
    for count in ("input_tokens", "output_tokens"):
        assert found["usage"][count] == wanted["usage"][count] > 0


def test_a_stream_has_the_published_events_and_the_whole_answer(server: Served) -> None:
    whole = post(server).json()
    answer = post(server, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    streamed = message_of(events_of(answer.text))
    assert streamed["content"] == whole["content"] and whole["content"][0]["text"]
    assert streamed["stop_reason"] == whole["stop_reason"] == "end_turn"
    assert streamed["usage"] == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [{"max_tokens": 0}, {"top_k": 5}, {"messages": []}, {"max_tokens": 1 << 30}],
    ids=["value", "field", "empty", "engine"],
)
def test_a_request_that_cannot_be_served_is_an_error(
    server: Served, body: dict[str, Any], stream: bool
) -> None:
    answer = post(server, stream=stream, **body)
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text


def test_a_client_that_leaves_ends_its_sequence(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3000, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with HTTP.stream("POST", server.url + "/messages", json=body, headers=headers) as answer:
        assert next(answer.iter_lines()) == "event: message_start"
    server.wait_idle()


def test_the_route_has_the_key_of_the_others(server: Served) -> None:
    assert HTTP.post(server.url + "/messages", json={}).status_code == 401


def test_a_template_needs_a_tokenizer() -> None:
    plugins = load_plugins(extra=[PLUGIN], entry_points=False)
    with served(plugins=plugins, tokenizer=False) as one:
        answer = post(one)
    assert answer.status_code == 400 and "without a tokenizer" in answer.json()["error"]["message"]


def test_the_path_of_the_servers_own_route_is_refused() -> None:
    from glowplug_messages.routes import routes  # type: ignore[import-not-found]

    class Plugin:
        @hookimpl
        def extend_app(self, app: Any, engine: Any) -> None:
            app.include_router(routes(engine), prefix="/v1")

    from glowplug.entrypoints.front.client import EngineClient
    from glowplug.entrypoints.server.app import create_app
    from tests.e2e.fake_engine import make_plan

    plan = make_plan()
    plugins = PluginSet([PluginSource("own", "", "own-dist", "1.0", loaded=Plugin())])
    with pytest.raises(PluginLoadError, match="POST /v1/messages of glowplug_messages.routes"):
        create_app(plan, EngineClient(plan, None, ()), None, (), plugins)


def test_the_command_prints_an_answer(
    server: Served,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commands are those of installed distributions."""
    installed = tmp_path / "glowplug_messages-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: {NAME}\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text(f"[glowplug]\nmessages = {PLUGIN}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["ask", "say:hé", "--url", server.url]
    assert main([*command, "--api-key", KEY]) == 0
    assert capsys.readouterr().out == post(server).json()["content"][0]["text"] + "\n"
    assert main(command) == 1
    assert "API key" in capsys.readouterr().err
    assert main([*command[:-1], "http://127.0.0.1:1"]) == 1
    assert "no server at http://127.0.0.1:1" in capsys.readouterr().err


def test_the_sample_is_small_and_imports_the_public_interface_only() -> None:
    assert private_imports(NAME) == []
    assert lines_of(NAME) <= MOST_LINES
