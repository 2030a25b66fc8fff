"""The record of structured output: 200 random schemas in every combination, and the masks' cost.

python -m tests.e2e.structured_record --out docs/benchmarks/structured-output.json

``--library xgrammar`` fills the section of that library.
Each part of a library has the conditions of its last run: commit, date, versions and load.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from glowplug import LLM, SamplingParams
from glowplug.core.errors import RequestError
from glowplug.core.facts.machine import installed, usable_cores
from glowplug.entrypoints.bench.others.conditions import conditions
from tests.e2e.structured import run
from tests.e2e.structured_cost import cost
from tests.e2e.structured_forced import forced
from tests.e2e.structured_gaps import gaps
from tests.support.hostile_grammars import HOSTILE

DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "chain": {"speculative": {"use": "nextn", "steps": 3}},
    "tree": {"speculative": {"use": "nextn", "steps": 3, "topk": 2, "draft_tokens": 6}},
}
LAYOUTS: dict[int, dict[str, Any]] = {
    1: {},
    2: {"parallel": [{"use": "tensor", "size": 2}], "executor": {"use": "multiprocess"}},
}
KEYS = ("ranks", "drafts", "reasoning", "streamed")
PAIRS = 7  #: pairs of runs with and without a schema
FORCED_SCHEMAS = 16  #: schemas of each kind with and without forced tokens as drafts


def combinations(library: str, count: int, record: dict[str, Any], out: Path) -> None:
    """Answer ``count`` schemas in each combination that ``record`` lacks; write after each."""
    rows = record.setdefault("schemas", [])
    done = {tuple(row[key] for key in KEYS) for row in rows}
    for (ranks, layout), (drafts, config) in product(LAYOUTS.items(), DRAFTS.items()):
        wanted = [
            (thinking, streamed)
            for thinking, streamed in product((False, True), repeat=2)
            if (ranks, drafts, thinking, streamed) not in done
        ]
        if not wanted:
            continue
        scheduler = {"max_running_requests": 32, "max_queued_requests": 1024}
        with LLM(**{**layout, **config}, grammar={"use": library}, scheduler=scheduler) as llm:
            for thinking, streamed in wanted:
                begun = time.perf_counter()
                found = run(llm, range(count), streamed=streamed, thinking=thinking)
                row = {
                    **dict(zip(KEYS, (ranks, drafts, thinking, streamed))),
                    "schemas": count,
                    "finished": found.finished,
                    "cut_at_the_token_limit": found.cut,
                    "wrong": found.wrong,
                    "seconds": round(time.perf_counter() - begun, 1),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
                write(out, library, record)


def write(out: Path, library: str, part: dict[str, Any]) -> None:
    """Put ``part`` into the record of ``library`` in the file ``out``."""
    whole = json.loads(out.read_text()) if out.exists() else {}
    whole[library] = part
    out.write_text(json.dumps(whole, indent=1) + "\n")


def circumstances(device: str) -> dict[str, Any]:
    """Return the conditions of a part that begins now, with the load of the machine."""
    found = conditions(device)
    libraries = {name: installed(name) for name in ("llguidance", "xgrammar")}
    return found | {
        "command": shlex.join(["python", "-m", "tests.e2e.structured_record", *sys.argv[1:]]),
        "packages": found["packages"] | {name: one for name, one in libraries.items() if one},
        "cores": usable_cores(),
        "load": [round(one, 2) for one in os.getloadavg()],
    }


def hostile(library: str) -> dict[str, Any]:
    """Send each hostile grammar for 16 tokens, and return its result and time, and the memory."""
    own = psutil.Process()
    rows = []
    with LLM(grammar={"use": library, "workers": 1}) as llm:
        llm.generate("hi", SamplingParams(regex="[ab]{3}"))
        before = own.memory_info().rss
        for number, (name, value) in enumerate(HOSTILE):
            begun = time.perf_counter()
            try:
                answer = llm.generate("hi", SamplingParams(**{name: value}, max_tokens=16))[0]
                result = answer.error or answer.finish_reason
            except RequestError as error:
                result = f"400: {str(error)[:120]}"
            seconds = round(time.perf_counter() - begun, 2)
            rows.append({"number": number, "kind": name, "result": result, "seconds": seconds})
            print(json.dumps(rows[-1]), flush=True)
        grown = own.memory_info().rss - before
    slowest = max(row["seconds"] for row in rows)
    return {"slowest_seconds": slowest, "engine_bytes_grown": grown, "grammars": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--library", default="llguidance")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--part", choices=["all", *PARTS, "schemas"], default="all")
    parser.add_argument("--device", default="cpu", help="of the cost")
    parser.add_argument("--model", default="embedded", help="of the cost; it has a tokenizer")
    parser.add_argument(
        "--drafts", nargs="+", choices=list(DRAFTS), default=["none"], help="of the cost"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of the cost and the gaps")
    args = parser.parse_args()
    whole = json.loads(args.out.read_text()) if args.out.exists() else {}
    part = whole.get(args.library, {})
    known = part.setdefault("conditions", {})
    for name, measure in PARTS.items():
        if args.part in ("all", name):
            cuda = name == "cost" and args.device != "cpu"
            key = f"{name}_{args.device}" if cuda else name
            began = circumstances("cuda" if cuda else "cpu")
            part[key] = measure(args)
            known[key] = began
            write(args.out, args.library, part)
    if args.part in ("all", "schemas"):
        known["schemas"] = circumstances("cpu")
        combinations(args.library, args.schemas, part, args.out)


def _cost(args: argparse.Namespace) -> list[dict[str, Any]]:
    drafts = {name: DRAFTS[name] for name in args.drafts}
    return cost(args.library, args.device, args.model, drafts, args.pairs)


#: part of the record -> its measurement
PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "cost": _cost,
    "hostile": lambda args: hostile(args.library),
    "gaps": lambda args: gaps(args.library, args.pairs),
    "forced": lambda args: forced(args.library, DRAFTS["chain"], FORCED_SCHEMAS),
}


if __name__ == "__main__":
    main()
