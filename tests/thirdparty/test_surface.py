"""The sample of surfaces of a third party: routes with the engine's handle, a mount, a flag and a
command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter

from glowplug.core.api import PluginLoadError, hookimpl
from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.cli.main import main
from tests.e2e.serving import HTTP, Served, served
from tests.thirdparty.packages import (
    FOLDER,
    MOST_LINES,
    lines_of,
    private_imports,
)

NAME = "glowplug-surface"
PLUGIN = "glowplug_surface.plugin"
KEY, ADMIN = "client-key", "admin-key"


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / NAME / "src"))
        yield


@pytest.fixture(scope="module")
def server(_package: None) -> Iterator[Served]:
    plugins = load_plugins(extra=[PLUGIN], entry_points=False)
    with served(plugins=plugins, server={"api_key": KEY, "admin_api_key": ADMIN}) as one:
        yield one


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_route_runs_requests_whole_and_as_a_stream(server: Served) -> None:
    body = {"prompt": [5, 6, 7], "tokens": 6}
    whole = HTTP.post(server.url + "/continue", json=body, headers=bearer(KEY)).json()
    assert whole["end"] == "length" and len(whole["tokens"]) == 6
    text = HTTP.post(
        server.url + "/continue", json={**body, "stream": True}, headers=bearer(KEY)
    ).text
    parts = [json.loads(line) for line in text.splitlines()]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["end"] for part in parts if part["end"]] == ["length"]


def test_errors_of_requests_become_answers(server: Served) -> None:
    body = {"prompt": [1 << 30]}
    answer = HTTP.post(server.url + "/continue", json=body, headers=bearer(KEY))
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "admin"),
    [("POST", "/continue", False), ("GET", "/continue/load", True), ("GET", "/status/", False)],
)
def test_routes_and_mounts_need_their_key(
    server: Served, method: str, path: str, admin: bool
) -> None:
    def status(headers: dict[str, str]) -> int:
        body = {"prompt": [5], "tokens": 1} if method == "POST" else None
        return HTTP.request(method, server.url + path, headers=headers, json=body).status_code

    assert (status({}), status(bearer("wrong"))) == (401, 401)
    assert status(bearer(KEY)) == (403 if admin else 200)
    assert status(bearer(ADMIN)) == 200


def test_start_and_stop_are_told() -> None:
    from glowplug_surface.routes import Page

    page = Page()

    class Plugin:
        @hookimpl
        def extend_app(self, engine: Any) -> None:
            engine.mount("/page", page)
            engine.on_start(page.open)
            engine.on_stop(page.close)

    with served(plugins=with_plugin(Plugin())) as one:
        assert HTTP.get(one.url + "/page/").text == "open"
    assert page.states == ["open", "closed"]


def with_plugin(plugin: object) -> PluginSet:
    return PluginSet([PluginSource("own", "", "own-dist", "1.0", loaded=plugin)])


async def nothing() -> dict[str, str]:
    return {}


async def something() -> dict[str, str]:
    return {"has": "content"}


class Routers:
    """A plugin of routers, each with one route, under prefixes."""

    def __init__(self, *routes: tuple[str, str, Any]) -> None:
        self._routes = routes

    @hookimpl
    def extend_app(self, app: Any) -> None:
        for prefix, path, endpoint in self._routes:
            router = APIRouter()
            router.add_api_route(path, endpoint)
            app.include_router(router, prefix=prefix)


@pytest.mark.parametrize(("prefix", "path"), [("", "/v1/models"), ("/v1", "/models")])
def test_a_route_that_another_one_hides_is_refused(prefix: str, path: str) -> None:
    from glowplug.entrypoints.front.client import EngineClient
    from glowplug.entrypoints.server.app import create_app
    from tests.e2e.fake_engine import make_plan

    plan = make_plan()
    with pytest.raises(PluginLoadError, match=r"GET /v1/models of tests.thirdparty.test_surface"):
        create_app(
            plan,
            EngineClient(plan, None, ()),
            None,
            (),
            with_plugin(Routers((prefix, path, nothing))),
        )


def test_routers_may_have_the_same_paths_under_other_prefixes() -> None:
    plugin = Routers(("/one", "/load", nothing), ("/two", "/load", something))
    with served(plugins=with_plugin(plugin)) as one:
        found = [HTTP.get(one.url + path).json() for path in ("/one/load", "/two/load")]
    assert found == [{}, {"has": "content"}]


def test_a_flag_sets_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "check",
        "--plugin",
        PLUGIN,
        "--facts",
        "cpu",
        "--queue-limit",
        "7",
    ]
    assert main(command) == 0
    row = next(
        line for line in capsys.readouterr().out.splitlines() if "max_queued_requests" in line
    )
    assert row.split()[1] == "7" and "--queue-limit" in row


def test_unknown_flags_are_still_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "--plugin", PLUGIN, "--queue-limits", "7"])
    assert caught.value.code == 2
    assert "unknown flag --queue-limits, did you mean --queue-limit?" in capsys.readouterr().err


def test_a_flag_that_is_taken_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taking_flags.py").write_text(
        "from glowplug.core.api import CommandFlag, hookimpl\n\n@hookimpl\n"
        "def command_flags():\n    return [CommandFlag('--seed', 'seed')]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["check", "--plugin", "taking_flags", "--no-such-flag"]) == 2
    assert "the flag --seed of its command_flags is taken" in capsys.readouterr().err


def test_the_sample_is_small_and_imports_the_public_interface_only() -> None:
    assert private_imports(NAME) == []
    assert lines_of(NAME) <= MOST_LINES
