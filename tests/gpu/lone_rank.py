"""One rank's share of DeepSeek-V3 on one GPU, and the steps of eight GPUs that follow from it.

``python -m tests.gpu.lone_rank --dry --output FILE``: commands, bytes of a rank and exchanges,
without a GPU.
``python -m tests.gpu.lone_rank --folder DIR --tokenizer DIR --output FILE``: measure rank 0 of each
layout on one H200 with random weights, and write what a step of all ranks takes by this: the time
of the rank, that of its exchanges, and that of the host's. The times of exchanges are those of
``--exchange-times FILE..``, records of ``bench kernels --collectives`` on eight GPUs, or else those
that docs/benchmarks/eight-gpus.md predicts. Runs that FILE has already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from glowplug.entrypoints.bench.alone.copies import HOST
from glowplug.entrypoints.bench.alone.llm import exchange_seconds
from glowplug.entrypoints.bench.others.layout import RankLayout
from glowplug.entrypoints.bench.others.report import write_json
from glowplug.entrypoints.bench.ranks.exchange_times import (
    EXCHANGE,
    CountedExchange,
    ExchangeTimes,
)
from tests.gpu import eight_gpus_expected as predicted
from tests.gpu.eight_gpus import V3, Setup, layouts, planned, write_model
from tests.gpu.eight_gpus_runs import LARGE, RANDOM, SMALL, Load, Run, command
from tests.gpu.whole_v3 import measured
from tests.support.source_tree import ROOT

TURNS = ROOT / "docs" / "benchmarks" / "rank-turns.json"
STEPS = "steps"  #: key of the record: the steps of each layout by number of sequences
NOTES = {
    "alone": "one rank on one device, exchanges replaced by copies of the same size on it, which "
    "are in the time",
    "step_ms": "alone_ms, exchange_ms and host_ms; waiting for slower ranks is not in it",
    "host_ms": "calls of the host's exchanges on rank 0, from rank-turns.json",
}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed options."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.lone_rank")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--dry", action="store_true", help="write plans only; needs no GPU")
    parser.add_argument("--folder", type=Path, help="folder for models, logs and results")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=8)
    parser.add_argument("--rank", type=int, default=0, help="the rank that is measured")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json of V3")
    parser.add_argument(
        "--exchange-times",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="records of `bench kernels --collectives` on so many GPUs",
    )
    parser.add_argument("--limit", type=float, help="seconds of each run, instead of its own")
    parser.add_argument("--small", action="store_true", help="a tiny model and few sequences")
    args = parser.parse_args(words)
    if args.small and args.tokenizer is None:
        args.tokenizer = ROOT / "models" / "embedded" / "checkpoint"
    if not args.dry and None in (args.folder, args.tokenizer):
        parser.error("--folder and --tokenizer are needed, except with --dry")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Write the record of plans, or of runs and steps.

    Returns:
        Exit status 0; 1 if a run failed or reached its limit.
    """
    args = parse(words)
    load = SMALL if args.small else LARGE
    folder = args.folder or Path("DIR")
    wanted = dict(alone_runs(folder, load, args.ranks, args.rank))
    if args.dry:
        write_json(args.output, dry_record(wanted, load, args.ranks))
        return 0
    write_model(load.model or V3, folder, args.tokenizer)
    status = measured(args, list(wanted.values()))
    record = json.loads(args.output.read_text(encoding="utf-8"))
    spent, source = times_of(args.exchange_times)
    record |= {"notes": NOTES, "exchange_times": source, STEPS: {}}
    for name, run in wanted.items():
        groups = layouts(args.ranks)[name].groups
        host = host_seconds(args.ranks, groups > 1)
        results = record["runs"][run.name].get("result", {}).get("results", [])
        record[STEPS][name] = [step_of(one, spent, host) for one in results if "error" not in one]
    write_json(args.output, record)
    for name, steps in record[STEPS].items():
        for step in steps:
            print(f"{name}: {step}", flush=True)
    return status


def alone_runs(folder: Path, load: Load, ranks: int, rank: int) -> Iterator[tuple[str, Run]]:
    """Yield each layout's name and the run of one of its ranks.

    Args:
        folder: place of models and results.
        load: sizes of the batches.
        ranks: number of ranks of the layouts.
        rank: the rank that runs.
    """
    model = load.model or V3
    for name, layout in layouts(ranks).items():
        title = f"{model}, {name}, rank {rank} alone"
        result = folder / f"{title.replace(', ', '-').replace(' ', '_')}.json"
        words = (
            *("-m", "glowplug", "bench", "one-batch"),
            *("--model", str(folder / model), *RANDOM, *layout.ours()),
            *("--alone", str(rank), "--batch-size", *map(str, batches(load, layout))),
            *("--input-len", str(load.prompt), "--output-len", str(load.steps)),
            *("--save", str(result)),
        )
        yield name, Run(title, words, result, 1800.0)


def batches(load: Load, layout: RankLayout) -> list[int]:
    """Return the numbers of sequences that the groups of a layout can share equally."""
    return [one for one in load.batches if one <= layout.groups or one % layout.groups == 0]


# ---- steps of all ranks --------------------------------------------------------------------------

#: function from a step's exchanges, as ``bench one-batch --alone`` records them, to seconds
Spent = Callable[[Sequence[dict[str, Any]]], float]


def times_of(files: Sequence[Path]) -> tuple[Spent, str]:
    """Return a function from a step's exchanges to their seconds, and its source in words.

    Args:
        files: records of measured exchanges; (): the prediction from two GPUs.
    """
    if not files:
        return predicted_seconds, "predicted from all-reduces of two GPUs, not measured"
    records = [orjson.loads(file.read_bytes()) for file in files]
    source = ", ".join(f"{f.name} ({r['date']}, {r['card']})" for f, r in zip(files, records))
    times = ExchangeTimes([row for record in records for row in record["rows"]], source)
    return lambda step: exchange_seconds(step, times), source


def predicted_seconds(step: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of a step's exchanges, predicted as in docs/benchmarks/eight-gpus.md."""
    times = predicted.two_gpu_times()
    found = 0.0
    for one in step:
        # an expert exchange is counted by its parts, whose bytes are known
        if one["axis"] != HOST and one["operation"] != EXCHANGE:
            exchange = CountedExchange(one["operation"], one["ranks"], one["bytes"], one["count"])
            found += exchange.count * predicted.one_exchange(exchange, times)
    return found


def host_seconds(ranks: int, groups: bool) -> float:
    """Return the measured seconds of the host's exchanges of a step, on rank 0.

    Args:
        ranks: number of ranks of one host.
        groups: True: groups agree on the step.
    """
    rows = json.loads(TURNS.read_text(encoding="utf-8"))["rows"]
    (row,) = (one for one in rows if (one["ranks"], one["way"]) == (ranks, "shared memory"))
    calls = row["calls_us"]
    agreed = calls["agreement, rank 0"] if groups else 0.0
    return float(calls["broadcast, rank 0"] + agreed) / 1e6


def step_of(one: dict[str, Any], spent: Spent, host: float) -> dict[str, Any]:
    """Return the decode step of all ranks that a record of one rank leads to.

    Args:
        one: a result of ``bench one-batch --alone``.
        spent: times of exchanges.
        host: seconds of the host's exchanges.
    """
    found = {
        "batch": one["batch_size"],
        "rows_of_rank": one["rows_of_rank"],
        "alone_ms": one["decode_median_ms"],
        "copied_bytes": one["copied_bytes"],
        "host_ms": host * 1e3,
    }
    try:
        exchange = spent(one["exchanges"]) * 1e3
    except ValueError as error:
        return found | {"error": str(error)}
    step = one["decode_median_ms"] + exchange + host * 1e3
    return found | {
        "exchange_ms": exchange,
        "step_ms": step,
        "tokens_per_s": one["batch_size"] / step * 1e3,
    }


def dry_record(wanted: dict[str, Run], load: Load, ranks: int) -> dict[str, Any]:
    """Return the record of what would run: commands, plans, and the prediction to compare with."""
    found: dict[str, Any] = {"what": "plans: nothing here was run or measured", "layouts": {}}
    for name, run in wanted.items():
        layout = layouts(ranks)[name]
        setup = Setup(name, load.model or V3, ranks, tuple(layout.ours()), layout)
        with tempfile.TemporaryDirectory() as folder:
            plan = planned(setup, Path(folder))
        entry: dict[str, Any] = {
            "command": command(run),
            "plan": plan,
            "host_ms": host_seconds(ranks, layout.groups > 1) * 1e3,
        }
        if ranks == predicted.RANKS and not load.model:
            entry["predicted"] = {
                str(batch): _prediction(name, batch) for batch in batches(load, layout)
            }
        found["layouts"][name] = entry
    return found


def _prediction(name: str, batch: int) -> dict[str, float]:
    """Return what docs/benchmarks/eight-gpus.md predicts of a step."""
    one = predicted.expected(name, batch, False)
    return {
        "read_ms": one.read_ms,
        "exchange_ms": one.exchange_ms,
        "expected_ms": one.expected_ms,
    }


if __name__ == "__main__":
    sys.exit(main())
