"""Cases that schemathesis generates from ``/openapi.json``, sent to a server with the embedded
model: no answer may have a status of 500 or more, an undeclared status or type of content, or a
body that the declared schema does not allow.

``python -m tests.clients.openapi_cases --cases 3000 --output docs/benchmarks/openapi-cases.json``
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from glowplug.entrypoints.bench.load.local_server import LocalServer
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions
from tests.support.source_tree import ROOT
from tests.support.waiting import LIMIT

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
#: few tokens for requests that give no limit, and short contexts: a case takes milliseconds
CONFIG: dict[str, Any] = {
    "model": "embedded",
    "device": "cpu",
    "context_length": 128,
    "memory": {"kv_tokens": 4096},
    "scheduler": {"max_running_requests": 16, "max_queued_requests": 256},
    "server": {"default_max_tokens": 8},
}
ROUND = 60  #: generated cases for each operation in one round, beside those of its coverage phase
ROUNDS_MAX = 20
SERIES = re.compile(
    r'glowplug:http_requests_total{.*handler="(.*)",method=".*",status="(\d+)"} (\d+)'
)


def one_round(url: str, folder: Path, seed: int, examples: int, site: str) -> dict[str, Any]:
    """Run schemathesis once and return its report.

    Args:
        url: the server's address.
        folder: a folder for the report.
        seed: seed of the cases.
        examples: generated cases for each operation.
        site: folder with schemathesis; "": it is installed.
    """
    path = folder / "report.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--max-examples", str(examples)]
    command += ["--seed", str(seed), "--no-shrink", "--continue-on-failure"]
    command += ["--request-timeout", f"{LIMIT:g}", "--report", "json"]
    command += ["--report-json-path", str(path)]
    ours = [str(ROOT / "src"), str(ROOT), *([site] if site else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")]),
        "SCHEMATHESIS_HOOKS": "tests.clients.openapi_hooks",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if not path.exists():
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    found: dict[str, Any] = json.loads(path.read_text())
    found["text"] = done.stdout
    return found


def statuses(url: str) -> dict[str, dict[str, int]]:
    """Return the number of answers of each status, by route."""
    counts: dict[str, Counter[str]] = {}
    for route, status, count in SERIES.findall(httpx.get(f"{url}/metrics", timeout=LIMIT).text):
        counts.setdefault(route, Counter())[status] += int(count)
    return {route: dict(sorted(found.items())) for route, found in sorted(counts.items())}


def unanswered(url: str, answers: Mapping[str, object]) -> list[str]:
    """Return the routes that ``/openapi.json`` of a server declares and ``answers`` lacks."""
    declared = httpx.get(f"{url}/openapi.json", timeout=LIMIT).json()["paths"]
    answered = {route.replace(":path}", "}") for route in answers}
    return sorted(declared.keys() - answered)


def run(cases: int, examples: int = ROUND, site: str = "") -> dict[str, Any]:
    """Send at least ``cases`` cases to a server and return the outcome."""
    sent, failures, rounds = 0, [], 0
    with tempfile.TemporaryDirectory() as name:
        os.environ["GLOWPLUG_PROFILE_DIR"] = name
        try:
            with LocalServer(CONFIG, threads=1) as server:
                while sent < cases and rounds < ROUNDS_MAX:
                    found = one_round(server.base_url, Path(name), rounds + 1, examples, site)
                    sent += found["test_cases"]["generated"]
                    failures += _failures(found)
                    rounds += 1
                answers = statuses(server.base_url)
                lacking = unanswered(server.base_url, answers)
        finally:
            del os.environ["GLOWPLUG_PROFILE_DIR"]
    return {
        "schemathesis": found["schemathesis_version"],
        "checks": list(CHECKS),
        "engine": CONFIG,
        "cases": sent,
        "rounds": rounds,
        "operations": found["operations"]["tested"],
        "failures": [*failures, *(f"no case for {route}" for route in lacking)],
        "answers": answers,
    }


def _failures(found: dict[str, Any]) -> list[str]:
    """Return the failed checks and errors of a round, with the text that describes them."""
    failed = found["failures"] or found["errors"] or not found["complete"]
    return [found["text"][-6000:]] if failed else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--site", default="", help="folder with schemathesis, if not installed")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    found = {**conditions("cpu"), **run(args.cases, site=args.site)}
    found["command"] = "python -m tests.clients.openapi_cases " + " ".join(sys.argv[1:])
    report.write_json(args.output, found)
    print(found["cases"], "cases,", len(found["failures"]), "rounds with failures")
    for text in found["failures"]:
        print(text)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
