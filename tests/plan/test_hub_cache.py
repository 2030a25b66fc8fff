"""Models of the local hub cache: revisions, incomplete downloads, and `glowplug download`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import FactsError, Refusal
from glowplug.core.facts.hub_cache import hub_cache
from glowplug.core.facts.model_folder import locate_model
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from glowplug.entrypoints.cli.commands import download
from glowplug.entrypoints.cli.main import main
from tests.plan.test_flags import given
from tests.support.source_tree import ROOT

OLD, NEW = "a" * 40, "b" * 40
TENSORS = {"model.embed_tokens.weight": ("BF16", (512, 128))}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder of the model some/model with two snapshots: main is OLD, next is NEW."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--some--model"
    for commit, layers in ((OLD, 2), (NEW, 3)):
        write_model(folder / "snapshots" / commit, {**TINY_V3, "num_hidden_layers": layers})
    (folder / "refs" / "pr").mkdir(parents=True)
    (folder / "refs" / "main").write_text(OLD)
    (folder / "refs" / "next").write_text(NEW)
    (folder / "refs" / "pr" / "1").write_text(NEW)
    return folder


@pytest.mark.parametrize(
    ("revision", "commit"),
    [(None, OLD), ("main", OLD), ("next", NEW), ("pr/1", NEW), (NEW, NEW)],
)
def test_a_revision_is_a_branch_a_tag_or_a_commit(
    cache: Path, revision: str | None, commit: str
) -> None:
    assert locate_model("some/model", revision) == str(cache / "snapshots" / commit)


@pytest.mark.parametrize("revision", ["gone", "c" * 40, "../refs", "refs/../../x", "/etc", "a\0b"])
def test_an_unknown_revision_is_refused_with_those_there_are(cache: Path, revision: str) -> None:
    with pytest.raises(FactsError, match="was not downloaded; downloaded are: main, next, pr/1"):
        locate_model("some/model", revision)


def test_the_variables_of_the_hub_s_tools_name_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [hub_cache()]
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
        found.append(hub_cache())
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        ".cache/huggingface/hub",
        "XDG_CACHE_HOME/huggingface/hub",
        "HF_HOME/hub",
        "HF_HUB_CACHE",
    ]


def test_an_incomplete_download_is_refused_with_the_missing_files(
    cache: Path, refused: Any
) -> None:
    snapshot = cache / "snapshots" / OLD
    names = [f"model-{i:05d}-of-00009.safetensors" for i in range(1, 10)]
    index = {"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "tokenizer.json").symlink_to("../../blobs/never-downloaded")
    found = refused({"model": "some/model"})["model"]
    assert "is incomplete; missing: model-00001-of-00009.safetensors, " in found.reason
    assert found.reason.endswith("and 4 more")
    assert found.fix == "glowplug download some/model continues it"


def test_the_hub_s_listing_names_weights_that_are_missing(cache: Path) -> None:
    (cache / "trees").mkdir()
    listing = {"files": {"model.safetensors": {}, "README.md": {}, "onnx/x.safetensors": {}}}
    (cache / "trees" / f"{OLD}.json").write_text(json.dumps(listing))
    with pytest.raises(FactsError, match="missing: model.safetensors$"):
        locate_model("some/model")
    write_model(cache / "snapshots" / OLD, TINY_V3, TENSORS)
    assert locate_model("some/model")


def test_a_damaged_index_is_left_to_the_reader_of_weights(cache: Path) -> None:
    (cache / "snapshots" / OLD / "model.safetensors.index.json").write_text("{")
    assert locate_model("some/model")


def test_the_plan_reads_the_given_revision(cache: Path, planned: Any) -> None:
    config = {"model": "some/model", "weights": {"use": "random"}, "skip_tokenizer": True}
    assert planned(config).facts.model.num_layers == 2
    plan = planned({**config, "revision": "next"})
    assert plan.facts.model.num_layers == 3
    (decision,) = [one for one in plan.decisions if one.field == "revision"]
    assert "no effect" not in decision.why


def test_a_model_is_served_without_a_flag(cache: Path, plugins: PluginSet) -> None:
    from glowplug.entrypoints.cli.commands import serve
    from glowplug.entrypoints.cli.flags.command_line import read_command_line
    from glowplug.entrypoints.cli.flags.parser import Parser

    def config(*words: str) -> dict[str, Any]:
        parser = Parser(prog="glowplug serve")
        serve.configure(parser)
        return read_command_line(parser.parse_args(list(words)), plugins).config

    expected = given(plugins, "--model", "some/model", "--port", "4").config
    for words in (("some/model", "--port", "4"), ("--port", "4", "some/model")):
        assert config(*words) == expected
    assert config("--port", "4") == {"server": {"port": 4}}


def test_a_model_given_twice_must_be_the_same(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--dry-run", "some/model", "--model", "other/model"]) == 2
    assert "contradict each other" in capsys.readouterr().err


def test_a_second_word_is_unexpected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "some/model", "8000"])
    assert "unexpected argument '8000'" in capsys.readouterr().err


# ---- download ------------------------------------------------------------------------------------


def model_files(folder: Path) -> dict[str, bytes]:
    write_model(folder, TINY_V3, TENSORS)
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Hub(BaseHTTPRequestHandler):
    """The routes of a hub that a download uses, for one model."""

    def __init__(self, files: dict[str, bytes], *args: Any) -> None:
        self._files = files
        super().__init__(*args)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path in ("/api/models/some/model", "/api/models/some/model/revision/main"):
            siblings = [{"rfilename": name} for name in self._files]
            self._send(200, json.dumps({"id": "some/model", "sha": NEW, "siblings": siblings}))
        elif path.startswith(f"/api/models/some/model/tree/{NEW}"):
            self._send(200, json.dumps([self._entry(name) for name in self._files]))
        elif path.startswith("/api/models/some/model/revision/"):
            self._send(404, "{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"/some/model/resolve/{NEW}/") and name in self._files:
            headers = {"X-Repo-Commit": NEW, "ETag": f'"{name}"'}
            self._send(200, self._files[name] if body else b"", headers, len(self._files[name]))
        else:
            self._send(404, "{}", {"X-Error-Code": "RepoNotFound"})

    def _entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self._files[name]), "oid": name}

    def _send(
        self,
        status: int,
        body: str | bytes,
        headers: dict[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Hub, model_files(tmp_path / "published"))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run_download(
    home: Path, endpoint: str, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run(
        [sys.executable, "-m", "glowplug", "download", *words],
        env={**environment, "HF_HUB_DISABLE_TELEMETRY": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_download_can_be_served_by_its_id(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: Any
) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    home = tmp_path / "home"
    done = run_download(home, hub, "some/model")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}, (
        "neither code nor pickled weights"
    )
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert planned({"model": "some/model"}).facts.model.path == str(folder)
    missing = run_download(home, hub, "some/model", "--revision", "gone")
    assert missing.returncode == 1 and "no revision 'gone'" in missing.stderr


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    done = run_download(tmp_path, "http://127.0.0.1:9", "some/model", HF_HUB_ETAG_TIMEOUT="1")
    assert done.returncode == 1
    assert "could not be downloaded from http://127.0.0.1:9" in done.stderr
    assert "set HF_ENDPOINT" in done.stderr and "Traceback" not in done.stderr


def test_a_download_without_the_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(download, "installed", lambda name: "")
    assert main(["download", "some/model"]) == 2
    assert 'pip install "glowplug[hub]"' in capsys.readouterr().err


def test_a_path_is_no_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "./models/x"]) == 2
    assert "is not the id of a model" in capsys.readouterr().err


def test_refusals_of_the_cache_name_the_field(cache: Path, refused: Any) -> None:
    found: Refusal = refused({"model": "some/model", "revision": "gone"})["model"]
    assert found.fix == "glowplug download some/model --revision gone, or another revision"
