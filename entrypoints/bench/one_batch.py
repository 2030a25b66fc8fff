"""``glowplug bench one-batch``: latency of one static batch without a server.

The options are those of SGLang's ``bench_one_batch``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import EngineDead, GlowplugError
from glowplug.core.step.draft_counts import DraftCounts, since
from glowplug.entrypoints.bench.alone.option import (
    about_rank,
    add_alone_option,
    open_engine,
    run_once,
)
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions
from glowplug.entrypoints.bench.others.drafts import (
    acceptance,
    add_simulation_options,
    counted,
    with_simulation,
)
from glowplug.entrypoints.bench.others.engine_options import add_batch_options, engine_config
from glowplug.entrypoints.bench.others.floor import known_card
from glowplug.entrypoints.bench.others.in_process import (
    BatchTimes,
    median_run,
    traced,
)
from glowplug.entrypoints.bench.others.step_floor import StepFloor
from glowplug.entrypoints.bench.ranks.exchange_times import ExchangeTimes
from glowplug.entrypoints.cli.flags.arguments import add_engine_options

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan
    from glowplug.entrypoints.front.llm import LLM

SHOWN_STEPS = 5  #: decode steps printed one by one
MAX_CHUNK = 32768  #: default limit on the prompt tokens of a step
#: least default context length, if the model supports it
MIN_CONTEXT = 4096
COLUMNS = (
    "batch_size",
    "input_len",
    "prefill_ms",
    "prefill_tokens_per_s",
    "decode_median_ms",
    "decode_mean_ms",
    "decode_tokens_per_s",
    "floor_ms",
    "floor_share",
)
#: further columns of runs with drafts
DRAFT_COLUMNS = ("accept_length", "allowed_speedup")


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    add_batch_options(group, "run")
    group.add_argument(
        "--repeat",
        type=int,
        default=3,
        help="measured runs of each combination; the median run is reported",
    )
    group.add_argument("--run-name", default="default", help="name stored in the record")
    group.add_argument(
        "--log-decode-step",
        type=int,
        default=0,
        metavar="N",
        help="also print every Nth decode step",
    )
    group.add_argument(
        "--profile", action="store_true", help="trace one more run with torch's profiler"
    )
    add_simulation_options(group)
    add_alone_option(group)
    _add_floor_options(group)
    group.add_argument(
        "--result-filename",
        "--output-file",
        default=None,
        metavar="FILE",
        help="append one JSON line for each combination",
    )
    group.add_argument(
        "--save",
        default=None,
        metavar="FILE",
        help="write a JSON document: conditions, plan, results",
    )
    add_engine_options(parser)


def _add_floor_options(group: Any) -> None:
    """Add the options of ``_floor`` to ``group``."""
    group.add_argument(
        "--bandwidth",
        type=float,
        default=None,
        metavar="TB/S",
        help="bandwidth of device memory for the floor; default: that of a copy on this card",
    )
    group.add_argument(
        "--exchange-times",
        type=Path,
        default=None,
        metavar="FILE",
        help="record of `bench kernels --collectives`: the floor of several ranks then includes "
        "their exchanges",
    )


def run(args: argparse.Namespace) -> int:
    """Measure static batches of every requested shape and print the table.

    Returns:
        Exit status 0; 1 when a batch failed (its record has the reason); 2 when the configuration
            or a shape is refused.
    """
    shapes = list(itertools.product(args.batch_size, args.input_len, args.output_len))
    try:
        given = with_simulation(engine_config(args), args)
        config = static_config(
            given, shapes, _positions(given.get("model", "embedded"), args.extra_plugins)
        )
        return _run(args, config, shapes)
    except (GlowplugError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _positions(model: str, extra: list[str]) -> int:
    """Return the maximum sequence length of the model in tokens."""
    from glowplug.core.plugin.registry import load_plugins

    return load_plugins(extra=extra).read_model(str(model)).facts.max_positions


def static_config(
    config: dict[str, Any], shapes: list[tuple[int, int, int]], positions: int
) -> dict[str, Any]:
    """Return ``config`` with defaults for static batches where the operator set nothing.

    The defaults make room for the largest batch and the longest sequence. All prompts are computed
    in few steps, before the first decode step. The prefix cache and the tokenizer are off.
    """
    if any(min(shape) < 1 for shape in shapes):
        raise ValueError("batch size, input length and output length must be at least 1")
    scheduler: dict[str, Any] = {
        "max_running_requests": max(batch for batch, _, _ in shapes),
        "chunk_size": min(MAX_CHUNK, max(batch * length for batch, length, _ in shapes)),
    }
    given = config.get("scheduler", {})
    if given.get("use", "continuous") == "continuous":
        scheduler["mixed"] = False
    context = min(positions, max(MIN_CONTEXT, *(length + output for _, length, output in shapes)))
    return {
        "skip_tokenizer": True,
        "cache": {"use": "none"},
        "context_length": context,
        **config,
        "scheduler": {**scheduler, **given},
    }


def _record_shape(
    args: argparse.Namespace,
    llm: LLM,
    rng: random.Random,
    shape: tuple[int, int, int],
    floor: StepFloor,
) -> dict[str, Any]:
    """Measure one batch shape and return its record.

    If the engine gave an error, the record has only the shape and the error.

    Args:
        args: options of the command.
        llm: the engine.
        rng: source of the prompts.
        shape: (sequences, prompt tokens, tokens to generate).
        floor: floor of decode steps.

    Raises:
        EngineDead: the engine has stopped.
    """
    try:
        times, drafts = _measure(args, llm, rng, shape)
        return {
            **record(times, args, llm, floor, drafts),
            **acceptance((), drafts),
            **report.startup_times(llm.control("info")),
            **about_rank(llm, rng, times, args.exchange_times),
        }
    except EngineDead:
        raise
    except GlowplugError as error:
        print(error, file=sys.stderr)
        batch, input_len, output_len = shape
        return {
            "batch_size": batch,
            "input_len": input_len,
            "output_len": output_len,
            "error": str(error),
        }


def _run(
    args: argparse.Namespace, config: dict[str, Any], shapes: list[tuple[int, int, int]]
) -> int:
    """Measure all batch shapes, write and print the records, and return the exit status."""
    with open_engine(args.alone, args.batch_size, config) as llm:
        rng = random.Random(llm.plan.seed)
        floor = _floor(args, llm.plan, shapes)
        records: list[dict[str, Any]] = []
        for shape in shapes:
            records.append(_record_shape(args, llm, rng, shape, floor))
            if args.result_filename:
                report.append_line(Path(args.result_filename), records[-1])
            if args.save:  # after each shape, so that an interrupted run keeps its results
                report.write_json(Path(args.save), document(llm, records, floor))
    print(_table(records))
    for note in {found["about"] for found in records if found.get("alone")}:
        print(note)
    return 1 if any("error" in found for found in records) else 0


def _table(records: list[dict[str, Any]]) -> str:
    """Return the table of the records, with columns about drafts if there were any."""
    drafted = any(found.get("accept_length") for found in records)
    columns = (*COLUMNS, *DRAFT_COLUMNS) if drafted else COLUMNS
    return report.table(columns, [[found.get(name, "-") for name in columns] for found in records])


def _floor(
    args: argparse.Namespace, plan: EnginePlan, shapes: list[tuple[int, int, int]]
) -> StepFloor:
    """Return the floor of the plan's decode steps; without exchanges for a rank alone.

    Raises:
        OSError: the file of ``--exchange-times`` cannot be read.
        ValueError: it has no time of an exchange that a step of ``shapes`` makes.
    """
    times = ExchangeTimes.read(args.exchange_times) if args.exchange_times else None
    bandwidth = args.bandwidth and args.bandwidth * 1e12
    found = StepFloor(plan, bandwidth, times)
    for batch, _, _ in shapes:
        found.exchange_seconds(batch)
    return found if args.alone is None else StepFloor(plan, bandwidth, None)


def _measure(
    args: argparse.Namespace, llm: LLM, rng: random.Random, shape: tuple[int, int, int]
) -> tuple[BatchTimes, Sequence[DraftCounts]]:
    """Measure one batch shape, after a warm-up.

    Returns:
        The times of the median run, and the counters of the drafts of all runs.
    """
    batch, length, output = shape
    print(f"Warmup (batch {batch}, input {length}, output {output}) ...")
    show(run_once(llm, rng, batch, length, min(output, 8)), 0)
    print("Benchmark ...")
    before = counted(llm)
    runs = range(max(args.repeat, 1))
    times = median_run([run_once(llm, rng, batch, length, output) for _ in runs])
    drafts = since(counted(llm), before)
    show(times, args.log_decode_step)
    if args.profile:
        name = f"one-batch-{batch}-{length}-{output}"
        print("trace:", traced(llm, name, lambda: run_once(llm, rng, batch, length, output)))
    return times, drafts


def show(times: BatchTimes, every: int) -> None:
    """Print the times of prefill, first decode steps, every Nth step, the median and the total."""
    print(
        f"Prefill. latency: {times.prefill:8.5f} s, "
        f"throughput: {times.prefill_throughput:10.2f} token/s"
    )
    for index, (seconds, gained) in enumerate(zip(times.decodes, times.gained, strict=True)):
        if index < SHOWN_STEPS or (every and index % every == 0):
            print(
                f"Decode {index}. Batch size: {times.batch}, latency: {seconds:8.5f} s, "
                f"throughput: {gained / seconds:10.2f} token/s"
            )
    if times.decodes:
        print(
            f"Decode.  median latency: {times.median_decode:8.5f} s, "
            f"mean latency: {times.mean_decode:8.5f} s, "
            f"median throughput: {times.decode_throughput:10.2f} token/s"
        )
    print(
        f"Total. latency: {times.total:7.3f} s, throughput: {times.throughput:10.2f} token/s",
        flush=True,
    )


def record(
    times: BatchTimes,
    args: argparse.Namespace,
    llm: LLM,
    floor: StepFloor,
    drafts: Sequence[DraftCounts] = (),
) -> dict[str, Any]:
    """Return the record of one static batch: SGLang's keys in seconds, then ours in milliseconds.

    Args:
        times: times of the batch.
        args: options of the command.
        llm: the engine.
        floor: floor of decode steps.
        drafts: counters of the drafts of the measured runs.
    """
    found: dict[str, Any] = {
        "run_name": args.run_name,
        "batch_size": times.batch,
        "input_len": times.input_len,
        "output_len": times.output_len,
        "prefill_latency": times.prefill,
        "prefill_throughput": times.prefill_throughput,
        "median_decode_latency": times.median_decode,
        "median_decode_throughput": times.decode_throughput,
        "total_latency": times.total,
        "overall_throughput": times.throughput,
        "runs": max(args.repeat, 1),
        "device": llm.plan.device,
        "prefill_ms": times.prefill * 1e3,
        "prefill_tokens_per_s": times.prefill_throughput,
        "decode_median_ms": times.median_decode * 1e3,
        "decode_mean_ms": times.mean_decode * 1e3,
        "decode_steps": len(times.steady),
        "decode_tokens_per_s": times.decode_throughput,
    }
    if floor.bandwidth and times.decodes:
        found |= floor.record(times.batch, times.input_len, times.median_decode, drafts)
    devices = llm.plan.facts.hardware.devices
    card = known_card(devices[0].name) if devices else None
    if card:
        on_ranks = replace(card, mesh=llm.plan.mesh)
        least = on_ranks.prefill(llm.plan.facts.model, times.batch, times.input_len)
        found |= {
            "floor_prefill_ms": least * 1e3,
            "floor_prefill_tokens_per_s": times.batch * times.input_len / least,
        }
    return found


def document(llm: LLM, records: list[dict[str, Any]], floor: StepFloor) -> dict[str, Any]:
    """Return the document that ``--save`` writes.

    The document has the conditions, the plan's choice for each slot, and every record.
    """
    plan = llm.plan
    return conditions(plan.device) | {
        "engine": "glowplug",
        "model": plan.model,
        "architecture": plan.facts.model.architecture,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "overlap": plan.overlap,
        "mesh": plan.mesh,
        "bandwidth_tb_s": floor.bandwidth / 1e12,
        "floor": floor.about,
        "chosen": {choice.slot: choice.options for choice in plan.choices},
        **report.startup_times(llm.control("info")),
        "results": records,
    }
