"""``glowplug bench one-batch``: latency of one static batch without a server; options as SGLang's bench_one_batch."""
from __future__ import annotations

import argparse
import itertools
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.bench import report
from glowplug.entrypoints.bench.engine_options import add_engine_options, engine_config
from glowplug.entrypoints.bench.in_process import BatchTimes, median_run, random_ids, run_static_batch

if TYPE_CHECKING:
    from glowplug.entrypoints.llm import LLM

SHOWN_STEPS = 5  #: decode steps printed one by one


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument("--batch-size", "--batch", type=int, nargs="+", default=[1], help="one run for each combination")
    group.add_argument("--input-len", "--input", type=int, nargs="+", default=[1024], help="prompt tokens")
    group.add_argument("--output-len", "--output", type=int, nargs="+", default=[16], help="tokens to generate")
    group.add_argument("--repeat", type=int, default=3, help="measured runs of each; the median one is reported")
    group.add_argument("--run-name", default="default", help="kept in the record")
    group.add_argument("--log-decode-step", type=int, default=0, metavar="N", help="also print every Nth decode step")
    group.add_argument("--profile", action="store_true", help="trace one further run with torch's profiler")
    group.add_argument("--result-filename", "--output-file", default=None, metavar="FILE",
                       help="append one JSON line for each combination")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 0, or 2 when the configuration is refused or a shape does not fit."""
    shapes = list(itertools.product(args.batch_size, args.input_len, args.output_len))
    try:
        config = static_config(engine_config(args), shapes)
        return _run(args, config, shapes)
    except (GlowplugError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def static_config(config: dict[str, Any], shapes: list[tuple[int, int, int]]) -> dict[str, Any]:
    """``config`` with what a static batch wants where the operator said nothing: room for the largest batch, its whole
    prefill in one step, each step read before the next is launched, no prefix cache."""
    if any(min(shape) < 1 for shape in shapes):
        raise ValueError("batch size, input length and output length are at least 1")
    scheduler = {"max_running_requests": max(batch for batch, _, _ in shapes),
                 "chunk_size": max(batch * length for batch, length, _ in shapes), "overlap": False}
    given = config.get("scheduler", {})
    return {"skip_tokenizer": True, "cache": {"use": "none"}, **config, "scheduler": {**scheduler, **given}}


def _run(args: argparse.Namespace, config: dict[str, Any], shapes: list[tuple[int, int, int]]) -> int:
    from glowplug.entrypoints.llm import LLM

    with LLM(**config) as llm:
        rng = random.Random(llm.plan.seed)
        vocab = llm.plan.facts.model.vocab_size
        for batch, length, output in shapes:
            print(f"Warmup (batch {batch}, input {length}, output {output}) ...")
            show(run_static_batch(llm, random_ids(rng, batch, length, vocab), min(output, 8)), 0)
            print("Benchmark ...")
            runs = [run_static_batch(llm, random_ids(rng, batch, length, vocab), output)
                    for _ in range(max(args.repeat, 1))]
            times = median_run(runs)
            show(times, args.log_decode_step)
            if args.profile:
                _trace(llm, random_ids(rng, batch, length, vocab), output)
            if args.result_filename:
                report.append_line(Path(args.result_filename), record(times, args.run_name, len(runs), llm.plan.device))
    return 0


def _trace(llm: LLM, prompts: list[list[int]], output: int) -> None:
    """One more run under the profiler. NOTE: never one of the measured runs, which tracing would slow down."""
    from glowplug.core.profiling import profile_folder  # here, since it needs torch

    llm.control("profile_start", label=f"one-batch-{len(prompts)}-{len(prompts[0])}-{output}")
    run_static_batch(llm, prompts, output)
    print("trace:", profile_folder() / llm.control("profile_stop")["file"])


def show(times: BatchTimes, every: int) -> None:
    """Prefill, the first decode steps, every Nth one, the median and the total."""
    print(f"Prefill. latency: {times.prefill:8.5f} s, throughput: {times.prefill_throughput:10.2f} token/s")
    for index, seconds in enumerate(times.decodes):
        if index < SHOWN_STEPS or (every and index % every == 0):
            print(f"Decode {index}. Batch size: {times.batch}, latency: {seconds:8.5f} s, "
                  f"throughput: {times.batch / seconds:10.2f} token/s")
    if times.decodes:
        print(f"Decode.  median latency: {times.median_decode:8.5f} s, "
              f"median throughput: {times.decode_throughput:10.2f} token/s")
    print(f"Total. latency: {times.total:7.3f} s, throughput: {times.throughput:10.2f} token/s", flush=True)


def record(times: BatchTimes, name: str, runs: int, device: str) -> dict[str, Any]:
    """Keys as SGLang's, and how many runs the median was taken of."""
    return {
        "run_name": name, "batch_size": times.batch, "input_len": times.input_len, "output_len": times.output_len,
        "prefill_latency": times.prefill, "prefill_throughput": times.prefill_throughput,
        "median_decode_latency": times.median_decode, "median_decode_throughput": times.decode_throughput,
        "total_latency": times.total, "overall_throughput": times.throughput, "runs": runs, "device": device,
    }
