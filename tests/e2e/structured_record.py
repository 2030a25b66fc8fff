"""The record of structured output: 200 random schemas in every combination, and the masks' cost.

python -m tests.e2e.structured_record --out docs/benchmarks/structured-output.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from glowplug import LLM, SamplingParams
from glowplug.core.errors import RequestError
from glowplug.core.facts.machine import installed
from tests.e2e.structured import run
from tests.e2e.structured_cost import cost
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
    whole["machine"] = {"cores": os.cpu_count(), "python": platform.python_version()}
    whole["packages"] = {name: installed(name) for name in ("torch", "llguidance", "xgrammar")}
    whole[library] = part
    out.write_text(json.dumps(whole, indent=1) + "\n")


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
    parser.add_argument(
        "--part", choices=["all", "cost", "gaps", "hostile", "schemas"], default="all"
    )
    parser.add_argument("--device", default="cpu", help="of the cost")
    parser.add_argument("--model", default="embedded", help="of the cost; it has a tokenizer")
    parser.add_argument(
        "--drafts", nargs="+", choices=list(DRAFTS), default=["none"], help="of the cost"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of the cost")
    args = parser.parse_args()
    whole = json.loads(args.out.read_text()) if args.out.exists() else {}
    part = whole.get(args.library, {})
    if args.part in ("all", "cost"):
        drafts = {name: DRAFTS[name] for name in args.drafts}
        name = "cost" if args.device == "cpu" else f"cost_{args.device}"
        part[name] = cost(args.library, args.device, args.model, drafts, args.pairs)
        write(args.out, args.library, part)
    if args.part in ("all", "hostile"):
        part["hostile"] = hostile(args.library)
        write(args.out, args.library, part)
    if args.part in ("all", "gaps"):
        part["gaps"] = gaps(args.library, args.pairs)
        write(args.out, args.library, part)
    if args.part in ("all", "schemas"):
        combinations(args.library, args.schemas, part, args.out)


if __name__ == "__main__":
    main()
