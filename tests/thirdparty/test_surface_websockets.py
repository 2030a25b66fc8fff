"""Websockets of a third party's plugin: keys, origins, errors, and the end of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import WebSocketRoute

from glowplug.core.api import PluginLoadError, hookimpl
from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.server.serve import HttpServer
from tests.e2e.serving import HTTP, Served, served
from tests.thirdparty.packages import FOLDER

PLUGIN = "glowplug_surface.live"
KEY, ADMIN = "client-key", "admin-key"


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / "glowplug-surface" / "src"))
        patch.setattr("glowplug.entrypoints.server.plugin_routes.find_spec", lambda name: name)
        yield


@pytest.fixture(scope="module")
def server(_package: None) -> Iterator[Served]:
    """A server that is called directly, below the protocol that needs a package."""
    plugins = load_plugins(extra=[PLUGIN], entry_points=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glowplug.entrypoints.server.serve.serves_websockets", lambda app: False)
        keys = {"api_key": KEY, "admin_api_key": ADMIN, "cors_origins": ["https://a.example"]}
        with served(plugins=plugins, server=keys) as one:
            patch.undo()
            yield one


def talk(server: Served, path: str, *texts: str, **headers: str) -> list[dict[str, Any]]:
    """Open a websocket, send texts and a disconnect; return the messages of the server."""
    given = [
        (b"host", b"here"),
        *((name.encode(), text.encode()) for name, text in headers.items()),
    ]
    scope = {
        "type": "websocket",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": given,
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
    }
    sent: list[dict[str, Any]] = []
    incoming = [{"type": "websocket.connect"}]
    incoming += [{"type": "websocket.receive", "text": text} for text in texts]
    incoming += [{"type": "websocket.disconnect", "code": 1000}]

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app: Any = server.server._http.config.loaded_app
    loop = server._loop
    asyncio.run_coroutine_threadsafe(app(scope, receive, send), loop).result(60)
    return sent


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in messages]


def test_a_websocket_sends_the_tokens_of_an_http_route(server: Served) -> None:
    body = json.dumps({"prompt": [5, 6, 7], "tokens": 6})
    found = talk(server, "/live", body, body, **bearer(KEY))
    assert found[0]["type"] == "websocket.accept"
    assert b"x-request-id" in dict(found[0]["headers"])
    parts = [json.loads(message["text"]) for message in found[1:]]
    assert [part["end"] for part in parts if part["end"]] == ["length", "length"]
    assert sum(len(part["tokens"]) for part in parts) == 12


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/live", "", 401),
        ("/live", "wrong", 401),
        ("/live/load", KEY, 403),
        ("/live", ADMIN, 101),
        ("/live/load", ADMIN, 101),
    ],
)
def test_a_websocket_needs_its_key(server: Served, path: str, key: str, status: int) -> None:
    found = talk(server, path, **bearer(key) if key else {})
    if status == 101:
        assert kinds(found) == ["websocket.accept"]
    else:
        assert (found[0]["type"], found[0]["status"]) == ("websocket.http.response.start", status)
        assert json.loads(found[1]["body"])["error"]["code"]


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [("https://evil.example", False), ("https://a.example", True), ("http://here", True)],
)
def test_pages_of_other_sites_open_no_websocket(server: Served, origin: str, allowed: bool) -> None:
    found = talk(server, "/live", origin=origin, **bearer(KEY))
    assert (found[0]["type"] == "websocket.accept") is allowed
    assert allowed or found[0]["status"] == 403


def test_an_error_of_a_request_closes_the_websocket_with_its_reason(server: Served) -> None:
    body = json.dumps({"prompt": [1 << 30]})
    found = talk(server, "/live", body, **bearer(KEY))
    assert kinds(found) == ["websocket.accept", "websocket.close"]
    assert found[1]["code"] == 1008 and "token" in found[1]["reason"]


def test_a_websocket_without_route_is_refused(server: Served) -> None:
    assert kinds(talk(server, "/nowhere", **bearer(KEY))) == ["websocket.close"]
    assert "WEBSOCKET" in HTTP.get(server.url + "/metrics", headers=bearer(ADMIN)).text


def refused(plugin: object) -> str:
    """Make the app with a plugin, and return the message of its refusal."""
    from glowplug.entrypoints.front.client import EngineClient
    from glowplug.entrypoints.server.app import create_app
    from tests.e2e.fake_engine import make_plan

    plan = make_plan()
    source = PluginSource("own", "", "own-dist", "1.0", loaded=plugin)
    with pytest.raises(PluginLoadError) as caught:
        create_app(plan, EngineClient(plan, None, ()), None, (), PluginSet([source]))
    return str(caught.value)


async def one(websocket: Any) -> None:
    await websocket.accept()


async def other(websocket: Any) -> None:
    await websocket.accept()


def test_websockets_of_one_path_are_refused() -> None:
    class Plugin:
        @hookimpl
        def extend_app(self, app: Any) -> None:
            app.add_api_websocket_route("/same", one)
            app.add_api_websocket_route("/same", other)

    said = refused(Plugin())
    assert "WEBSOCKET /same" in said and "own-dist 1.0" in said and "fix: " in said


def test_a_websocket_that_the_check_of_keys_does_not_cover_is_refused() -> None:
    class Plugin:
        @hookimpl
        def extend_app(self, app: Any) -> None:
            app.router.routes.append(WebSocketRoute("/bare", one))

    assert "authentication would not cover it" in refused(Plugin())


def test_a_websocket_without_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        @hookimpl
        def extend_app(self, app: Any) -> None:
            app.add_api_websocket_route("/live", one)

    monkeypatch.setattr("glowplug.entrypoints.server.plugin_routes.find_spec", lambda name: None)
    said = refused(Plugin())
    assert "/live" in said and "pip install 'glowplug[websockets]'" in said


# ---- over a connection ---------------------------------------------------------------------------


def test_a_client_talks_until_the_server_ends() -> None:
    client = pytest.importorskip("websockets.sync.client")
    exceptions = pytest.importorskip("websockets.exceptions")
    plugins = load_plugins(extra=[PLUGIN], entry_points=False)
    with served(plugins=plugins, server={"api_key": KEY}) as one:
        url = one.url.replace("http", "ws") + "/live"
        with pytest.raises(exceptions.InvalidStatus) as caught:
            client.connect(url)
        assert caught.value.response.status_code == 401
        with client.connect(url, additional_headers=bearer(KEY)) as connection:
            connection.send(json.dumps({"prompt": [5, 6, 7], "tokens": 6}))
            found: list[int] = []
            while len(found) < 6:
                found += json.loads(connection.recv(60))["tokens"]
            one.stop()
            with pytest.raises(exceptions.ConnectionClosed) as closed:
                while True:
                    connection.recv(60)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        assert one.join() == 0
    assert isinstance(one.server, HttpServer)
