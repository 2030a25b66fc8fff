"""Clients of others that are run unchanged against a server with the embedded model.

``python -m tests.clients.programs_table --sites '/work/site-{name}' --output
docs/benchmarks/clients.json`` runs all and writes the record of ``docs/clients.md``. The packages
of a client are searched for in its folder of ``--sites``, then among the installed ones; a client
for Node needs ``node_modules`` in its folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from glowplug.entrypoints.bench.load.local_server import MODEL, LocalServer
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions
from tests.support.source_tree import ROOT

PROGRAMS = Path(__file__).parent / "programs"
CONFIG: dict[str, Any] = {
    "model": "embedded",
    "device": "cpu",
    "context_length": 1024,
    "memory": {"kv_tokens": 8192},
    "scheduler": {"max_running_requests": 16},
    # without reasoning: over a prompt with tools the small model would reason to the end
    "outputs": [{"use": "deepseek_v31"}],
}
SECONDS = 600  #: time limit of one client; the machine may be busy


@dataclass(frozen=True)
class Client:
    """A client and the program of ``programs`` that uses it.

    Attributes:
        name: the distribution's name, on PyPI or npm.
        program: file in ``programs``.
        module: module whose presence shows that the client is installed; for Node, the package's
            folder in ``node_modules``.
        folder: name of its folder in ``--sites``.
        note: remark for the table.
    """

    name: str
    program: str
    module: str
    folder: str
    note: str = ""

    @property
    def node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = (
    Client("openai", "use_openai.py", "openai", "openai"),
    Client("anthropic", "use_anthropic.py", "anthropic", "anthropic"),
    Client("openai (Node)", "use_openai_node.mjs", "openai", "node"),
    Client("@anthropic-ai/sdk (Node)", "use_anthropic_node.mjs", "@anthropic-ai/sdk", "node"),
    Client("ai, @ai-sdk/openai-compatible (Node)", "use_ai_sdk.mjs", "ai", "node"),
    Client("langchain-openai", "use_langchain.py", "langchain_openai", "langchain"),
    Client(
        "llama-index-llms-openai-like",
        "use_llama_index.py",
        "llama_index.llms.openai_like",
        "llamaindex",
    ),
    Client("litellm", "use_litellm.py", "litellm", "litellm"),
    Client("instructor", "use_instructor.py", "instructor", "instructor"),
    Client("locust", "use_locust.py", "locust", "locust"),
    Client(
        "lm_eval",
        "use_lm_eval.py",
        "lm_eval",
        "lm-eval",
        "log-likelihoods and texts of local tasks",
    ),
    Client("guidellm", "use_guidellm.py", "guidellm", "guidellm"),
    Client(
        "sglang", "use_sglang_bench.py", "sglang", "sglang", "its serving benchmark, from its wheel"
    ),
    Client(
        "vllm",
        "use_vllm_bench.py",
        "vllm",
        "vllm",
        "its serving benchmark, from its wheel; it imports packages of its CUDA environment",
    ),
)


def search_path(client: Client, sites: str) -> list[str]:
    """Return the folders that hold the client's packages besides the installed ones."""
    folder = Path(sites.format(name=client.folder)) if sites else None
    return [str(folder)] if folder and folder.is_dir() else []


def missing(client: Client, sites: str = "") -> str:
    """Return the reason why the client cannot run here; "" if it can."""
    folders = search_path(client, sites)
    if client.node:
        if shutil.which("node") is None:
            return "Node is not installed"
        found = any((Path(one) / "node_modules" / client.module).is_dir() for one in folders)
        return "" if found else f"npm install {client.module}, then --sites"
    sys.path[:0] = folders
    try:
        spec = importlib.util.find_spec(client.module)
    except ImportError:
        spec = None
    finally:
        del sys.path[: len(folders)]
    return "" if spec else f"pip install {client.name} to run it"


@contextmanager
def _workplace(client: Client, sites: str) -> Iterator[Path]:
    """Yield a folder with the program, as its interpreter needs it."""
    with tempfile.TemporaryDirectory(prefix="glowplug-client-") as name:
        folder = Path(name)
        for path in PROGRAMS.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        if client.node:
            modules = Path(search_path(client, sites)[0]) / "node_modules"
            (folder / "node_modules").symlink_to(modules.resolve())
        yield folder


def run(client: Client, url: str, sites: str = "") -> dict[str, str]:
    """Run the client's program and return its checks, {name: error, or ""}.

    Raises:
        RuntimeError: the program ended without a result; with the end of its output.
    """
    with _workplace(client, sites) as folder:
        program = ["node"] if client.node else [sys.executable]
        done = subprocess.run(
            [*program, client.program, url, MODEL],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(search_path(client, sites)),
                "HOME": str(folder),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZER": str(ROOT / "models" / "embedded" / "checkpoint"),
                "DO_NOT_TRACK": "1",
            },
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    try:
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:]) from None
    return found


def version(client: Client, sites: str) -> str:
    """Return the version of the installed client."""
    folders = search_path(client, sites)
    if client.node:
        path = Path(folders[0]) / "node_modules" / client.module / "package.json"
        return str(json.loads(path.read_text())["version"])
    for one in distributions(path=[*folders, *sys.path]):
        if one.metadata["Name"].lower().replace("_", "-") == client.name.replace("_", "-"):
            return one.version
    return "?"


def rows(url: str, sites: str, only: str = "") -> Iterator[dict[str, Any]]:
    """Yield the row of each client in the record."""
    for client in CLIENTS:
        if only and client.folder != only:
            continue
        row: dict[str, Any] = {"client": client.name, "note": client.note, "checks": {}}
        row["missing"] = missing(client, sites)
        if not row["missing"]:
            row["version"] = version(client, sites)
            try:
                row["checks"] = run(client, url, sites)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                row["missing"] = str(error).strip().splitlines()[-1][-300:]
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", default="", help="folders of clients, with {name}")
    parser.add_argument("--only", default="", help="folder of the one client to run")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    found: dict[str, Any] = {**conditions("cpu"), "engine": CONFIG, "clients": []}
    found["command"] = "python -m tests.clients.programs_table " + " ".join(sys.argv[1:])
    with LocalServer(CONFIG, threads=1) as server:
        for row in rows(server.base_url, args.sites, args.only):
            found["clients"].append(row)
            print(json.dumps(row), flush=True)
            report.write_json(args.output, found)
    return int(any(any(row["checks"].values()) for row in found["clients"]))


if __name__ == "__main__":
    sys.exit(main())
