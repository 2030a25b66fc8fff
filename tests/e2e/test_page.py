"""The page at ``/`` without a browser: files, headers, keys, the off switch, and ``/status``."""

from __future__ import annotations

import fnmatch
import re
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.server import serve
from glowplug.entrypoints.server.page.files import MEDIA_TYPES
from glowplug.entrypoints.server.page.status import REQUESTS_MAX
from glowplug.entrypoints.server.protocol.responses import EngineStatus, ModelInfo
from glowplug.plugins.executors.multiprocess import MultiprocessOptions
from glowplug.plugins.executors.multiprocess_runtime import MultiprocessExecutor
from glowplug.plugins.executors.ranks.failure_cause import SPAWNING
from tests.e2e.fake_engine import FakeExecutor, make_plan
from tests.e2e.serving import HTTP, Served, served
from tests.support.source_tree import ROOT
from tests.support.waiting import until
from tests.unit.test_sizes import FILE_CHARACTERS, FILE_LINES

STATIC = ROOT / "entrypoints" / "server" / "page" / "static"
FILES = sorted(path.name for path in STATIC.iterdir())
PATHS = ["/" if name == "index.html" else f"/page/{name}" for name in FILES]
KEY, ADMIN = "client-key", "admin-key"
#: addresses in the files that are names and no links
NAMESPACES = {"http://www.w3.org/2000/svg"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(server={"api_key": KEY, "admin_api_key": ADMIN}) as one:
        yield one


@pytest.mark.parametrize("path", PATHS)
def test_files_load_without_a_key_under_a_strict_policy(server: Served, path: str) -> None:
    answer = HTTP.get(server.url + path)
    assert answer.status_code == 200
    assert answer.text == (STATIC / (path.rpartition("/")[2] or "index.html")).read_text()
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert "unsafe" not in str(policy)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    kept = HTTP.get(server.url + path, headers={"If-None-Match": answer.headers["etag"]})
    assert kept.status_code == 304 and not kept.content


def test_the_page_without_a_key_opens_nothing_else(server: Served) -> None:
    assert HTTP.get(server.url + "/page/settings.json").json() == {"key_required": True}
    for path in ("/status", "/server_info", "/model_info", "/v1/models"):
        assert HTTP.get(server.url + path).status_code == 401
        keyed = HTTP.get(server.url + path, headers={"Authorization": f"Bearer {KEY}"})
        assert keyed.status_code == 200 and KEY not in keyed.text
    for path in ("/page/", "/page/..%2fapp.py", "/page/../app.py", "/page/files.py", "//"):
        assert HTTP.get(server.url + path).status_code == 404


def test_the_page_says_that_no_key_is_needed() -> None:
    with served() as one:
        assert HTTP.get(one.url + "/page/settings.json").json() == {"key_required": False}


def test_the_page_can_be_switched_off() -> None:
    with served(server={"page": False}) as one:
        for path in [*PATHS, "/page/settings.json"]:
            assert HTTP.get(one.url + path).status_code == 404
        assert HTTP.get(one.url + "/status").status_code == 200


def test_links_in_the_page_are_relative_and_served() -> None:
    """A proxy may serve the page below a path of its own."""
    links = re.findall(r'(?:href|src)="([^"#]+)"', (STATIC / "index.html").read_text())
    links += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', scripts())]
    assert len(links) > 8
    assert {f"/{link}" for link in links} <= set(PATHS)
    requests = re.findall(r'(?:getJson|events)\("([^"]+)"', scripts())
    assert {"status", "server_info", "model_info", "v1/models"} <= set(requests)
    assert not any(path.startswith(("/", "http")) for path in requests)


def scripts() -> str:
    return "".join((STATIC / name).read_text() for name in FILES if name.endswith(".js"))


@pytest.mark.parametrize("name", FILES)
def test_files_are_small_and_load_nothing_from_elsewhere(name: str) -> None:
    text = (STATIC / name).read_text()
    assert len(text) <= FILE_CHARACTERS and len(text.splitlines()) <= FILE_LINES
    assert set(re.findall(r"\w+://[\w./]+", text)) <= NAMESPACES
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
    assert "localStorage" not in text and "document.cookie" not in text
    assert (STATIC / name).suffix in MEDIA_TYPES


def test_the_wheels_package_data_has_every_file_of_the_page() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = config["tool"]["setuptools"]["package-data"]["glowplug.entrypoints"]
    names = [f"server/page/static/{name}" for name in FILES]
    assert [one for one in names if not any(fnmatch.fnmatch(one, p) for p in patterns)] == []


def test_the_page_offers_no_admin_action() -> None:
    text = scripts() + (STATIC / "index.html").read_text()
    for route in ("flush_cache", "start_profile", "stop_profile", "reset_expert_load"):
        assert route not in text


# ---- /status -------------------------------------------------------------------------------------


def test_status_has_the_fields_of_its_schema(server: Served) -> None:
    keyed = {"Authorization": f"Bearer {KEY}"}
    status = HTTP.get(server.url + "/status", headers=keyed).json()
    EngineStatus.model_validate(status, strict=True)
    assert set(status) == set(EngineStatus.model_fields)
    assert (status["status"], status["model"]) == ("ready", "fake")
    info = HTTP.get(server.url + "/model_info", headers=keyed).json()
    assert set(info) == set(ModelInfo.model_fields)
    assert info["has_chat_template"] and info["thinking_switch"]
    schema = HTTP.get(server.url + "/openapi.json", headers=keyed).json()
    answer = schema["paths"]["/status"]["get"]["responses"]["200"]["content"]["application/json"]
    assert answer["schema"] == {"$ref": "#/components/schemas/EngineStatus"}


def test_status_lists_requests_in_flight_without_their_text() -> None:
    with served(FakeExecutor(rows=2)) as one:
        held = threading.Event()
        threads = [threading.Thread(target=hang, args=(one.url, f"r{i}", held)) for i in range(3)]
        for thread in threads:
            thread.start()
        status = until(
            lambda: (
                found
                if (found := HTTP.get(one.url + "/status").json())["running"] == 2
                and found["waiting"] == 1
                else None
            ),
            "two run and one waits",
        )
        assert status["requests_in_flight"] == len(status["requests"]) == 3 <= REQUESTS_MAX
        assert {row["id"] for row in status["requests"]} == {"r0", "r1", "r2"}
        assert {row["prompt_tokens"] for row in status["requests"]} == {len("hang:secret")}
        assert status["requests"][0]["first_token_seconds"] is None
        assert "secret" not in str(status) and status["kv"]["usage"] > 0
        HTTP.post(one.url + "/abort_request", json={"abort_all": True})
        for thread in threads:
            thread.join()
        one.wait_idle()
        ended = HTTP.get(one.url + "/status").json()
        assert ended["requests"] == [] and ended["counters"]["aborted"] == 3


def hang(url: str, rid: str, held: threading.Event) -> None:
    """Send a request that gets no token."""
    HTTP.post(url + "/v1/completions", json={"prompt": "hang:secret", "request_id": rid})


def test_counters_of_status_grow_with_answers(server: Served) -> None:
    keyed = {"Authorization": f"Bearer {KEY}"}
    before = HTTP.get(server.url + "/status", headers=keyed).json()
    body = {"prompt": "say:0123456789", "max_tokens": 8}
    assert HTTP.post(server.url + "/v1/completions", json=body, headers=keyed).status_code == 200
    after = HTTP.get(server.url + "/status", headers=keyed).json()
    assert after["counters"]["output_tokens"] - before["counters"]["output_tokens"] == 8
    assert after["latency"]["first_token"]["count"] == before["latency"]["first_token"]["count"] + 1
    assert after["time"] > before["time"] and after["started"] == before["started"]


def test_status_shows_the_phases_of_a_start(tmp_path: Path) -> None:
    loaded = threading.Event()
    with served(FakeExecutor(loaded=loaded), ready=False) as one:
        until(lambda: hasattr(one, "context"), "the server has its context")
        one.context.client._progress = lambda: {0: "weights 41%", 1: "build"}
        status = HTTP.get(one.url + "/status").json()
        assert status["status"] == "starting"
        assert status["progress"] == {"0": "weights 41%", "1": "build"}
        loaded.set()
        one.wait_ready()
        status = HTTP.get(one.url + "/status").json()
        assert (status["status"], status["progress"]) == ("ready", {})


def test_the_server_reads_the_phases_from_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SimpleNamespace(leads=True, progress={0: "weights 41%"})
    found = []

    def until_done(*args: Any, progress: Callable[[], Mapping[int, str]], **more: Any) -> int:
        found.append(progress())
        return 0

    monkeypatch.setattr(serve, "make_executor", lambda plan, plugins: executor)
    monkeypatch.setattr(serve, "open_tokenizer", lambda plan, plugins: None)
    monkeypatch.setattr(serve, "set_up_logging", lambda options: None)
    monkeypatch.setattr(serve.sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(serve, "serve_until_done", until_done)
    assert serve.main(make_plan(server={"port": 0}), PluginSet(())) == 0
    assert found == [{0: "weights 41%"}]
    alone = MultiprocessExecutor(MultiprocessOptions(), make_plan(), None)
    assert alone.progress == {0: SPAWNING}
