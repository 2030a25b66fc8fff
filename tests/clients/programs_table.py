"""Clients of others that are run unchanged against a server with the embedded model.

``python -m tests.clients.programs_table --sites '/folder/{name}' --output
docs/benchmarks/clients.json`` runs all and writes the record of ``docs/clients.md``. The folder of
a client in ``--sites`` is a virtual environment (its interpreter then runs the program), a folder
of packages (``pip install --target``), which are searched before the installed ones, or for Node a
folder with ``node_modules``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
#: the engine of the server that the checks of reasoning use
REASONING: dict[str, Any] = {**CONFIG, "outputs": [{"use": "deepseek_r1"}]}
SECONDS = 600  #: time limit of one client; the machine may be busy


@dataclass(frozen=True)
class Client:
    """A client and the program of ``programs`` that uses it.

    Attributes:
        name: the distribution's name, on PyPI or npm.
        program: file in ``programs``.
        folder: name of its folder in ``--sites``.
        package: for Node, the package's folder in ``node_modules``.
        note: remark for the table.
    """

    name: str
    program: str
    folder: str
    package: str = ""
    note: str = ""

    @property
    def node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = (
    Client("openai", "use_openai.py", "openai"),
    Client("anthropic", "use_anthropic.py", "anthropic"),
    Client("openai (Node)", "use_openai_node.mjs", "node", "openai"),
    Client("@anthropic-ai/sdk (Node)", "use_anthropic_node.mjs", "node", "@anthropic-ai/sdk"),
    Client("ai, @ai-sdk/openai-compatible (Node)", "use_ai_sdk.mjs", "node", "ai"),
    Client("langchain-openai", "use_langchain.py", "langchain"),
    Client("llama-index-llms-openai-like", "use_llama_index.py", "llamaindex"),
    Client("litellm", "use_litellm.py", "litellm"),
    Client("instructor", "use_instructor.py", "instructor"),
    Client("locust", "use_locust.py", "locust"),
    Client("lm_eval", "use_lm_eval.py", "lm-eval", note="log-likelihoods and texts of local tasks"),
    Client("guidellm", "use_guidellm.py", "guidellm"),
    Client("sglang", "use_sglang_bench.py", "sglang", note="its serving benchmark, from its wheel"),
    Client("vllm", "use_vllm_bench.py", "vllm", note="its serving benchmark, from its wheel"),
)
PROBE = """
import importlib.metadata, sys
try:
    print(importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    pass
"""


def site(client: Client, sites: str) -> Path | None:
    """Return the client's folder of ``--sites``; None if there is none."""
    folder = Path(sites.format(name=client.folder)).resolve() if sites else None
    return folder if folder and folder.is_dir() else None


def command(client: Client, sites: str) -> list[str]:
    """Return the interpreter of the client's program."""
    if client.node:
        return ["node"]
    folder = site(client, sites)
    own = folder is not None and (folder / "pyvenv.cfg").is_file()
    return [str(folder / "bin" / "python") if folder and own else sys.executable]


def environment(client: Client, sites: str) -> dict[str, str]:
    """Return the environment of the client's program."""
    folder = site(client, sites)
    packages = str(folder) if folder and command(client, sites) == [sys.executable] else ""
    return {
        **os.environ,
        "PYTHONPATH": packages,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZER": str(ROOT / "models" / "embedded" / "checkpoint"),
        "DO_NOT_TRACK": "1",
    }


def version(client: Client, sites: str) -> str:
    """Return the version of the installed client; "" if it is not installed."""
    if client.node:
        folder = site(client, sites) or Path("/nonexistent")
        manifest = folder / "node_modules" / client.package / "package.json"
        return str(json.loads(manifest.read_text())["version"]) if manifest.is_file() else ""
    done = subprocess.run(
        [*command(client, sites), "-c", PROBE, client.name],
        env=environment(client, sites),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def missing(client: Client, sites: str) -> str:
    """Return the reason why the client cannot run here; "" if it can."""
    if client.node and shutil.which("node") is None:
        return "Node is not installed"
    if version(client, sites):
        return ""
    install = f"npm install {client.package}" if client.node else f"pip install {client.name}"
    return f"not installed: {install}, in a folder of the sites"


@contextmanager
def _workplace(client: Client, sites: str) -> Iterator[Path]:
    """Yield a folder with the program, as its interpreter needs it."""
    with tempfile.TemporaryDirectory(prefix="glowplug-client-") as name:
        folder = Path(name)
        for path in PROGRAMS.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        packages = site(client, sites)
        if client.node and packages:
            (folder / "node_modules").symlink_to(packages / "node_modules")
        yield folder


@contextmanager
def servers() -> Iterator[list[str]]:
    """Yield the addresses of a server without reasoning and of one with it."""
    with LocalServer(CONFIG, threads=1) as plain, LocalServer(REASONING, threads=1) as reasoning:
        yield [plain.base_url, reasoning.base_url]


def run(client: Client, urls: Sequence[str], sites: str) -> dict[str, str]:
    """Run the client's program and return its checks, {name: error, or ""}.

    Args:
        client: the client, which is installed.
        urls: addresses of ``servers``.
        sites: pattern of the clients' folders, or "".

    Raises:
        RuntimeError: the program ended without a result; with the end of its output.
    """
    with _workplace(client, sites) as folder:
        done = subprocess.run(
            [*command(client, sites), client.program, MODEL, *urls],
            cwd=folder,
            env={**environment(client, sites), "HOME": str(folder)},
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


def rows(urls: Sequence[str], sites: str, only: str = "") -> Iterator[dict[str, Any]]:
    """Yield the row of each client in the record."""
    for client in CLIENTS:
        if only and client.folder != only:
            continue
        row: dict[str, Any] = {"client": client.name, "note": client.note, "checks": {}}
        row["missing"] = missing(client, sites)
        if not row["missing"]:
            row["version"] = version(client, sites)
            try:
                row["checks"] = run(client, urls, sites)
            except subprocess.TimeoutExpired:
                row["missing"] = f"not finished after {SECONDS} s"
            except RuntimeError as error:
                row["missing"] = str(error).strip().splitlines()[-1][-300:]
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", default="", help="folders of clients, with {name}")
    parser.add_argument("--only", default="", help="folder of the one client to run")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    found: dict[str, Any] = {
        **conditions("cpu"),
        "engine": CONFIG,
        "reasoning": REASONING,
        "clients": [],
    }
    found["command"] = "python -m tests.clients.programs_table " + " ".join(sys.argv[1:])
    with servers() as urls:
        for row in rows(urls, args.sites, args.only):
            found["clients"].append(row)
            print(json.dumps(row), flush=True)
            report.write_json(args.output, found)
    return int(any(any(row["checks"].values()) for row in found["clients"]))


if __name__ == "__main__":
    sys.exit(main())
