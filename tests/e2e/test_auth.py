"""Keys: every route is closed unless listed, and no spelling of a request opens one (reliability:
Host tricks).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI

from glowplug.core.errors import PluginLoadError, RequestError
from glowplug.core.plugin.options import ServerOptions
from glowplug.entrypoints.server.page.files import page_files
from glowplug.entrypoints.server.refused import REASONS
from glowplug.entrypoints.server.routes import ROUTES
from glowplug.entrypoints.server.transport.auth import Authoriser, leaf_routes, require_guarded
from tests.e2e.serving import HTTP, Served, served
from tests.support.waiting import LIMIT

KEY, ADMIN = "client-key", "admin-key"
OPEN = {"/health", "/ready", "/metrics"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(server={"api_key": KEY, "admin_api_key": ADMIN}) as one:
        one.executor.loads = [{"model.layers.1.mlp": [1, 2]}]
        yield one


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


#: routes whose answer to a request with a key and no body is an error of the request
NEEDING_MORE = {*REASONS, *(route.path for route in ROUTES if "{response_id}" in route.path)}


def every_call() -> list[tuple[str, str, bool]]:
    calls = [
        (method, route.path.replace("{model:path}", "fake"), route.admin)
        for route in ROUTES
        for method in route.methods
    ]
    return [*calls, ("GET", "/openapi.json", False)]


def test_the_table_lists_every_route() -> None:
    with served() as one:
        paths = {route.path for route in leaf_routes(one.server._http.config.app)}
    page = {file.path for file in page_files(key_required=False)}
    assert paths == {route.path for route in ROUTES} | {"/openapi.json"} | page


@pytest.mark.parametrize(("method", "path", "admin"), every_call())
def test_every_route_is_closed_unless_listed(
    server: Served, method: str, path: str, admin: bool
) -> None:
    url = server.url + path
    closed = 200 if path in OPEN else 401
    assert HTTP.request(method, url).status_code == closed
    assert HTTP.request(method, url, headers=bearer("wrong")).status_code == closed
    if admin:
        assert HTTP.request(method, url, headers=bearer(KEY)).status_code == 403
        assert HTTP.request(method, url, headers=bearer(ADMIN)).status_code == 200
    else:  # past the gate: a missing body, or an unknown response, is an error of its own
        for key in (KEY, ADMIN):
            for header in (bearer(key), {"X-Api-Key": key}):
                found = HTTP.request(method, url, headers=header).status_code
                assert found in ((400, 404) if path in NEEDING_MORE else (200, 415))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Api-Key": KEY}, 200),
        ({"X-Api-Key": f"{KEY}x"}, 401),
        ({"X-Api-Key": KEY, "Authorization": "Bearer wrong"}, 401),
        ({"X-Api-Key": "wrong", "Authorization": f"Bearer {KEY}"}, 200),
        ({"X-Api-Key": KEY, "Authorization": "Basic wrong"}, 200),
    ],
)
def test_a_bearer_token_counts_before_the_header_of_anthropics_clients(
    server: Served, headers: dict[str, str], status: int
) -> None:
    assert HTTP.get(server.url + "/version", headers=headers).status_code == status


NEAR = ["", "Bearer", f"bearer{KEY}", f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY} x"]


@pytest.mark.parametrize("value", NEAR)
def test_near_keys_are_no_keys(server: Served, value: str) -> None:
    assert HTTP.get(server.url + "/v1/models", headers={"Authorization": value}).status_code == 401


def test_the_scheme_has_no_case_and_the_error_no_secret(server: Served) -> None:
    assert (
        HTTP.get(server.url + "/v1/models", headers={"authorization": f"bEaReR {KEY}"}).status_code
        == 200
    )
    refused = HTTP.get(server.url + "/v1/models", headers=bearer("guess"))
    assert KEY not in refused.text and "guess" not in refused.text
    assert refused.json()["error"]["type"] == "authentication_error"


def raw(server: Served, request: bytes) -> bytes:
    """Return the first bytes of the answer to ``request``, which is sent byte for byte."""
    with socket.create_connection((server.host, server.port), timeout=LIMIT) as connection:
        connection.sendall(request)
        return connection.recv(65536)


CLOSED_PATHS = [
    b"/v1/models",
    b"//v1/models",
    b"/v1/../v1/models",
    b"/V1/models",
    b"/health/../v1/models",
    b"/v1/models/",
    b"/v1/models?/health",
    b"/v1/models#/health",
    b"/%76%31/models",
    b"/health%2f..%2fv1%2fmodels",
    b"http://x/v1/models",
    b"http://x/health/../v1/models",
    b"/health;/v1/models",
    b"/v1/models\\health",
]
HOSTS = [
    b"x",
    b"x/?",
    b"x#",
    b"x/health?",
    b"x\\@y",
    b"localhost/v1/models?",
    b"a b",
    b"",
    b"x:1:2/",
    b"\xff",
]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", CLOSED_PATHS)
def test_no_host_or_path_opens_a_route(server: Served, path: bytes, host: bytes) -> None:
    answer = raw(
        server, b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
    )
    assert answer.split(b" ", 2)[1] in (b"400", b"401", b"404"), answer[:200]


def test_missing_and_double_hosts_are_refused(server: Served) -> None:
    for head in (
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ):
        assert b" 400 " in raw(server, head)


def test_a_key_of_any_bytes_is_401_not_500(server: Served) -> None:
    answer = raw(
        server,
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xf0\x9f\x97\x9d\r\n\r\n",
    )
    assert b" 401 " in answer


def test_without_an_admin_key_the_api_key_opens_everything() -> None:
    with served(server={"api_key": KEY}) as one:
        assert HTTP.post(one.url + "/flush_cache").status_code == 401
        assert HTTP.post(one.url + "/flush_cache", headers=bearer(KEY)).status_code == 200


def test_only_an_admin_key_closes_only_the_admin_routes() -> None:
    gate = Authoriser(ServerOptions(admin_api_key=ADMIN), ["/flush_cache"])
    gate.check(gate.level("/v1/models"), None)
    with pytest.raises(RequestError, match="API key"):
        gate.check(gate.level("/flush_cache"), None)
    gate.check(gate.level("/flush_cache"), f"Bearer {ADMIN}")


def test_open_routes_can_be_closed() -> None:
    with served(server={"api_key": KEY, "open_routes": ["/ready"]}) as one:
        assert HTTP.get(one.url + "/metrics").status_code == 401
        assert HTTP.get(one.url + "/ready").status_code == 200


class PluginSet:
    """The part of a plugin set that the app reads: a hook that adds a route."""

    def call_each(self, hook: str, **given: Any) -> list[Any]:
        if hook == "extend_app":
            router = APIRouter(prefix="/mine")
            router.add_api_route("/health", nothing)  # named like an open route, but not one
            given["app"].include_router(router)
        return []


def test_a_plugins_routes_are_closed_too() -> None:
    with served(plugins=PluginSet(), server={"api_key": KEY}) as one:
        assert HTTP.get(one.url + "/mine/health").status_code == 401
        assert HTTP.get(one.url + "/mine/health", headers=bearer(KEY)).json() == {}


def nothing() -> dict[str, str]:
    return {}


def test_a_plugin_cannot_add_a_route_past_the_gate() -> None:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    router = APIRouter(prefix="/mine")
    router.add_api_route("/x", nothing)
    app.include_router(router)
    require_guarded(app)
    app.mount("/apart", FastAPI())
    with pytest.raises(PluginLoadError, match="/apart"):
        require_guarded(app)
