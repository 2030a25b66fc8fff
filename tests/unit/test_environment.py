"""``.ci/environment.py`` chooses where torch comes from in an environment without torch. The index
is served by these tests.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.source_tree import ROOT

PIN = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
CLOSED = "http://127.0.0.1:9/whl/cpu"  #: nothing listens there


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_environment", ROOT / ".ci" / "environment.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def no_other_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip without configuration of this machine, which could be another source of torch."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, environment: ModuleType) -> Path:
    """An environment without torch."""
    folder = tmp_path_factory.mktemp("made") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def venv(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "venv", symlinks=True))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A local index that holds a package torch with the local version part of a CPU build."""
    root = tmp_path_factory.mktemp("index")
    (root / "torch").mkdir()
    info = f"torch-{PIN}+cpu.dist-info"
    files = {
        "torch.py": b"",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {PIN}+cpu\n"
        "Requires-Dist: package-that-is-nowhere\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},"
        f"{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(root / "torch" / f"torch-{PIN}+cpu-py3-none-any.whl", "w") as wheel:
        for name, data in {
            **files,
            f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode(),
        }.items():
            wheel.writestr(name, data)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def constraints(venv: Path) -> list[str]:
    return [
        line
        for line in (venv / ".constraints").read_text().splitlines()
        if line.startswith("torch==")
    ]


def without_gpu(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    monkeypatch.setattr(environment, "has_nvidia", lambda: False)
    monkeypatch.setattr(environment, "CPU_INDEX", index)


def test_torch_comes_from_the_index_of_cpu_builds_where_no_gpu_is(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, venv: Path, index: str
) -> None:
    """Only the pinned release of torch comes from that index; its dependencies come from pip's own
    index.
    """
    without_gpu(environment, monkeypatch, index)
    assert environment.main([str(venv)]) == 0
    assert environment.torch_version(str(venv / "bin" / "python")) == f"{PIN}+cpu"
    assert constraints(venv) == [f"torch=={PIN}+cpu"]
    without_gpu(environment, monkeypatch, CLOSED)
    assert environment.main([str(venv)]) == 0 and constraints(venv) == [f"torch=={PIN}+cpu"], (
        "it stays"
    )


def test_an_index_out_of_reach_leaves_torch_to_pip(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    venv: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without_gpu(environment, monkeypatch, CLOSED)
    assert environment.main([str(venv)]) == 0
    assert constraints(venv) == [f"torch=={PIN}"]
    assert environment.torch_version(str(venv / "bin" / "python")) is None
    assert f"{CLOSED} cannot be reached" in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["auto", ""])
def test_with_a_gpu_or_an_empty_index_torch_is_left_to_pip(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, venv: Path, index: str, asked: str
) -> None:
    without_gpu(environment, monkeypatch, index)
    monkeypatch.setattr(environment, "has_nvidia", lambda: asked == "auto")
    assert environment.main([str(venv), "--torch-index", asked]) == 0
    assert constraints(venv) == [f"torch=={PIN}"]


def test_a_requested_index_is_used_or_the_set_up_ends(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    venv: Path,
    index: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(environment, "has_nvidia", lambda: True)
    assert environment.main([str(venv), "--torch-index", CLOSED]) == 1
    said = capsys.readouterr().out
    assert f"torch=={PIN} could not be installed from {CLOSED}" in said and "TORCH_INDEX=" in said
    assert not (venv / ".constraints").exists(), "make would skip the rest of the set-up"
    assert environment.main([str(venv), "--torch-index", index]) == 0
    assert constraints(venv) == [f"torch=={PIN}+cpu"]


def test_a_python_without_venv_is_named_with_the_package_to_install(
    environment: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Debian's python3 cannot make environments until python3-venv is installed."""
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    assert environment.main([str(tmp_path / "venv"), "--torch-index", ""]) == 1
    said = capsys.readouterr().out
    assert "python3-venv" in said and "make PYTHON=" in said
    assert not (tmp_path / "venv").exists()
    assert "python3-venv" in (ROOT / "README.md").read_text()


def test_make_and_docker_pass_the_index_on() -> None:
    make = subprocess.run(
        [
            "make",
            "--dry-run",
            "--always-make",
            "TORCH_INDEX=http://index",
            "VENV=/nowhere/venv",
            "/nowhere/venv/.constraints",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(r"\.ci/environment\.py /nowhere/venv --torch-index 'http://index'", make)
    docker = (ROOT / "Dockerfile").read_text()
    (index,) = re.findall(r"^ARG TORCH_INDEX=(\S+)$", docker, re.MULTILINE)
    assert index == "https://download.pytorch.org/whl/cpu"
    assert (
        docker.index("FROM ${BASE} AS build")
        < docker.index("ARG TORCH_INDEX")
        < docker.index('"${TORCH_INDEX}"')
    )


def test_the_readme_names_the_index_of_cpu_builds(environment: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert (
        f"pip install --index-url {environment.CPU_INDEX} torch=={PIN}`" in readme
        and "TORCH_INDEX" in readme
    )
