"""The environment of ``make demo``: its packages, programs that run in it, and plans for other
machines.
"""

from __future__ import annotations

import importlib.metadata
import json
import socket
import subprocess
import sys
import tomllib
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from glowplug.core.facts.machine import read_sheet
from tests.support.demo_environment import dependencies, glowplug, python, run, variables
from tests.support.source_tree import ROOT, imported, name_of, sources
from tests.support.waiting import until

#: import names of packages in the extras for users; a runtime module that uses one needs a reason
#: to be chosen
EXTRAS = {
    *("triton", "flashinfer", "sgl_kernel", "deep_gemm", "ray", "xgrammar"),
    *("opentelemetry", "sentencepiece", "google", "huggingface_hub", "deepseek_recipe"),
}
#: packages that a single folder may import -> the folder's reason
APART = {
    "pytest": "core/testing/",  # suites that plugin authors run under pytest
    "matplotlib": "entrypoints/bench/plots/",  # an extra: charts are refused without it
    "transformers": "entrypoints/bench/",
    "vllm": "entrypoints/bench/peer_scripts/",
    "sglang": "entrypoints/bench/peer_scripts/",
}  # comparison targets of the benchmarks
V3 = ("--model", "models/shapes/deepseek-v3.json", "--load-format", "dummy")
LITE = ("--model", "models/shapes/deepseek-v2-lite.json", "--load-format", "dummy")


def found(names: list[str]) -> set[str]:
    """Return those of ``names`` that can be imported there."""
    done = run(
        "-c",
        f"import importlib.util as u, json; print(json.dumps([n for n in {names!r} if "
        "u.find_spec(n)]))",
    )
    return set(json.loads(done.stdout))


def test_it_holds_exactly_the_dependencies_of_the_project() -> None:
    kept = dependencies()
    extras: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    hidden = {
        canonicalize_name(Requirement(text).name) for text in sum(extras.values(), [])
    } - kept.keys()
    assert hidden >= {"pytest", "httpx", "openai", "transformers", "psutil", "gguf"}
    owners = {
        module: set(map(canonicalize_name, names))
        for module, names in importlib.metadata.packages_distributions().items()
    }
    modules = sorted(
        module for module, names in owners.items() if names & hidden and not names & kept.keys()
    )
    assert len(modules) >= 6 and found(modules) == set()
    assert found(["torch", "numpy", "pydantic_core", "fastapi", "glowplug"]) == {
        "torch",
        "numpy",
        "pydantic_core",
        "fastapi",
        "glowplug",
    }
    names = run(
        "-c",
        "import importlib.metadata as m; print(*(d.metadata['Name'] for d in m.distributions()))",
    ).stdout
    listed = set(map(canonicalize_name, names.split()))
    assert (
        listed - {"glowplug"} == kept.keys()
    )  # an editable installation leaves metadata in this tree


def test_no_runtime_module_imports_what_only_tests_install() -> None:
    """Imports within functions count."""
    named = [
        (name_of(path), module.split(".")[0], line)
        for path in sources()
        for module, line in imported(path)
    ]
    outside = [
        (file, top, line)
        for file, top, line in named
        if top not in EXTRAS | sys.stdlib_module_names and not file.startswith(APART.get(top, "//"))
    ]
    there = found(sorted({top for _, top, _ in outside}))
    assert "torch" in there
    assert [f"{file}:{line}: {top}" for file, top, line in outside if top not in there] == []


def plan(*words: str, done: subprocess.CompletedProcess[str] | None = None) -> dict[str, Any]:
    """Return the plan made there for ``words``, or the plan printed by the command ``done``
    elsewhere.
    """
    done = done or glowplug("check", *words, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


def choices(planned: dict[str, Any]) -> dict[str, str]:
    return {choice["slot"]: choice["name"] for choice in planned["choices"]}


def test_v3_on_eight_gpus_is_planned_as_there() -> None:
    planned = plan("--facts", "8xh200", *V3, "--tp", "8")
    assert planned["device"] == "cuda" and planned["mesh"] == {"tp": 8}
    chosen = choices(planned)
    assert (chosen["attention"], chosen["quantization"], chosen["collectives"]) == (
        "hopper_mla",
        "block_fp8",
        "peer_memory",
    )
    assert (chosen["sampling"], chosen["ops"]) == ("triton", "triton")
    decided = {decision["field"]: decision["value"] for decision in planned["decisions"]}
    assert decided["quantization.experts"] == "by load", "DeepGEMM is installed there"
    assert decided["kernels.tables"] == "measured", "tables of that release of Triton are trusted"


def test_v2_lite_on_one_gpu_is_planned_as_there() -> None:
    chosen = choices(plan("--facts", "1xh200", *LITE))
    assert (chosen["attention"], chosen["graphs"], chosen["sampling"]) == (
        "hopper_mla",
        "cuda_graph",
        "triton",
    )


@pytest.mark.parametrize(
    "words", [("--facts", "1xh200", *LITE), ("--facts", "cpu")], ids=["1xh200", "cpu"]
)
def test_a_ready_sheets_plan_is_the_same_with_other_packages_here(words: tuple[str, ...]) -> None:
    """The plan equals that of this environment, which has triton, third-party plugins and the test
    tools.
    """
    here = plan(
        done=subprocess.run(
            [sys.executable, "-m", "glowplug", "check", *words, "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=ROOT,
            env={**variables(), "PYTHONPATH": str(ROOT / "src")},
        )
    )
    there = plan(*words)
    assert there["facts"]["software"]["packages"] == read_sheet(words[1]).packages
    for planned in (here, there):
        for name in ("plugin_fingerprint", "plugins"):  # third-party plugins and their requirements
            planned.pop(name)
        planned["facts"].pop("software")
        planned["decisions"] = [one for one in planned["decisions"] if one["field"] != "packages"]
    assert here == there


def test_the_demo_answers() -> None:
    done = glowplug("demo", "What is 27 + 15?")
    assert done.returncode == 0 and "\n42\n" in done.stdout, done.stdout + done.stderr


def test_the_server_answers(tmp_path: Path) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (log := tmp_path / "log").open("w") as output:
        server = subprocess.Popen(
            [python(), "-m", "glowplug", "serve", "--port", str(port)],
            cwd=tmp_path,
            env=variables(),
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: server.poll() is not None or _ready(port), "the server is ready", 120.0)
        assert server.poll() is None, log.read_text()
        body = {
            "messages": [{"role": "user", "content": "What is 27 + 15?"}],
            "temperature": 0,
            "max_tokens": 8,
        }
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "42"
    finally:
        server.terminate()
        server.wait(60)
    assert server.returncode == 0, log.read_text()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
