"""DeepSeek-V3 whole on eight GPUs: plans and measurements.

``python -m tests.gpu.whole_v3 --dry --output FILE``: the plans of all setups, without a GPU.
``python -m tests.gpu.whole_v3 --folder DIR --tokenizer DIR --output FILE``: measure the setups of
``--ranks`` GPUs with random weights; ``--sglang PYTHON`` measures SGLang beside them with the same
flags. The record is written after each run. Runs that it has already are not repeated.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.entrypoints.bench.others.report import write_json
from tests.gpu.eight_gpus import plans
from tests.gpu.eight_gpus_runs import LARGE, SMALL, Run, command, measure, runs
from tests.support.source_tree import ROOT

PLAN_NOTES = {
    "what": "plans, made from fact sheets: nothing here was run or measured",
    "how": "python -m tests.gpu.whole_v3 --dry --output docs/benchmarks/eight-gpus-plan.json",
    "sizes": "bytes are those of the rank with most; sizes of exchanges are bytes of the whole "
    "tensor, of an expert exchange tokens of each rank",
    "S0": "rows 1 to 10 are the command lines that SGLang issue 3956 publishes, rows 11 to 16 "
    "combinations that only its tables name; 16 ranks as published, then scaled to 8 and to 2",
}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed options."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.whole_v3")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--dry", action="store_true", help="write plans only; needs no GPU")
    parser.add_argument("--folder", type=Path, help="folder for models, logs and results")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=8)
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json of V3")
    parser.add_argument("--sglang", metavar="PYTHON", help="interpreter that has SGLang")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of runs to measure")
    parser.add_argument("--limit", type=float, help="seconds of each run, instead of its own")
    parser.add_argument("--prompts", type=int, help="prompts of a row of the ablation")
    parser.add_argument(
        "--capture",
        action="store_true",
        help="also capture graphs in rows of the ablation that are published without",
    )
    parser.add_argument("--list", action="store_true", help="print the runs' commands and end")
    parser.add_argument("--small", action="store_true", help="a tiny model and few requests")
    args = parser.parse_args(words)
    if args.small and args.tokenizer is None:
        args.tokenizer = ROOT / "models" / "embedded" / "checkpoint"
    if not args.dry and None in (args.folder, args.tokenizer):
        parser.error("--folder and --tokenizer are needed, except with --dry")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Write the record of plans or of runs.

    Returns:
        Exit status 0; 1 if a run failed or reached its limit.
    """
    args = parse(words)
    if args.dry:
        write_json(args.output, {**PLAN_NOTES, "plans": plans()})
        return 0
    load = SMALL if args.small else LARGE
    if args.prompts:
        load = replace(load, ablation=(args.prompts, *load.ablation[1:]))
    load = replace(load, capture=args.capture)
    wanted = [
        run
        for run in runs(args.folder, args.ranks, load, args.tokenizer, args.sglang)
        if fnmatch.fnmatchcase(run.name, args.only)
    ]
    if args.list:
        for run in wanted:
            print(f"{run.name}: {command(run)}")
        return 0
    return measured(args, wanted)


def measured(args: argparse.Namespace, wanted: Sequence[Run]) -> int:
    """Measure the runs that the record lacks, one after another, and return the exit status."""
    record: dict[str, Any] = {"what": "measured by python -m tests.gpu.whole_v3", "runs": {}}
    if args.output.exists():
        record = json.loads(args.output.read_text(encoding="utf-8"))
    found = record["runs"]
    for run in wanted:
        before = found.get(run.name, {})
        if before.get("state") == "done" and before.get("command") == command(run):
            print(f"{run.name}: done before", flush=True)
            continue
        found[run.name] = measure(run, args.folder, args.limit or run.limit)
        write_json(args.output, record)
        print(f"{run.name}: {found[run.name]['state']}", flush=True)
    return 0 if all(found[run.name]["state"] == "done" for run in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
