"""``glowplug bench offline``: throughput of the offline engine on random or given prompts.

All prompts are passed to one ``LLM.generate`` call, which batches them continuously. The options
include those of SGLang's ``bench_offline_throughput``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.bench.load import sharegpt
from glowplug.entrypoints.bench.load.dataset_checks import check_dataset_options
from glowplug.entrypoints.bench.load.dataset_options import (
    add_sharegpt_options,
    sharegpt_sampling,
)
from glowplug.entrypoints.bench.load.datasets import custom_prompts, random_lengths
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.drafts import (
    acceptance,
    add_simulation_options,
    counted,
    with_simulation,
)
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.bench.others.in_process import traced
from glowplug.entrypoints.cli.flags.arguments import add_engine_options

if TYPE_CHECKING:
    from glowplug.core.step.request import SamplingParams
    from glowplug.entrypoints.front.llm import LLM


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--backend", choices=("engine",), default="engine", help="the engine in this process"
    )
    group.add_argument(
        "--dataset-name",
        choices=("random", "custom", "sharegpt"),
        default="random",
        help="custom and sharegpt read --dataset-path",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help='custom: JSON lines with "prompt", "output_tokens"; sharegpt: the published JSON list '
        'with "conversations"',
    )
    add_sharegpt_options(group)
    group.add_argument("--num-prompts", type=int, default=64)
    group.add_argument("--random-input-len", "--random-input", "--input-len", type=int, default=256)
    group.add_argument(
        "--random-output-len", "--random-output", "--output-len", type=int, default=64
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=1.0,
        help="lengths are uniform in [length * ratio, length]",
    )
    group.add_argument(
        "--repeat",
        type=int,
        default=3,
        help="measured runs; the run of median duration is reported",
    )
    group.add_argument(
        "--warmup-prompts", type=int, default=None, help="prompts of the warm-up run; default: all"
    )
    group.add_argument("--skip-warmup", action="store_true", help="measure without a warm-up run")
    group.add_argument(
        "--disable-ignore-eos",
        action="store_true",
        help="let outputs end at the end-of-sequence token",
    )
    group.add_argument(
        "--profile", action="store_true", help="trace one more run with torch's profiler"
    )
    group.add_argument(
        "--result-filename",
        "--output-file",
        default=None,
        metavar="FILE",
        help="append one JSON line",
    )
    add_simulation_options(group)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the engine without a server, print the median run, and return the exit status.

    Returns:
        0; 2 if the model or an option is refused.
    """
    try:
        if (args.dataset_name == "random") == bool(args.dataset_path):
            raise ValueError("--dataset-name custom or sharegpt and --dataset-path need each other")
        check_dataset_options(args)
        text = bool(args.dataset_path)
        config = with_simulation({"skip_tokenizer": not text, **engine_config(args)}, args)
        records = _measure(args, config)
    except (GlowplugError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    found = sorted(records, key=lambda record: record["duration"])[(len(records) - 1) // 2]
    shown = {key: value for key, value in found.items() if not isinstance(value, dict)}
    print("\n".join(report.line(key, value) for key, value in shown.items()))
    if args.result_filename:
        report.append_line(Path(args.result_filename), found)
    return 0


def _measure(args: argparse.Namespace, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the record of each measured run, after a warm-up run."""
    from glowplug.core.step.request import SamplingParams
    from glowplug.entrypoints.front.llm import LLM

    with LLM(**config) as llm:
        rng = random.Random(llm.plan.seed)
        inputs, outputs = _requests(args, llm, rng)
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=not args.disable_ignore_eos
            )
            for count in outputs
        ]
        records = []
        for index in range(args.repeat + 1):
            prompts = [
                _random_ids(rng, llm, one) if isinstance(one, int) else one for one in inputs
            ]
            if index > 0:
                records.append(_run_once(args, llm, prompts, params))
            elif not args.skip_warmup:
                count = args.warmup_prompts
                llm.generate(prompts[:count], params[:count], use_tqdm=False)
        if args.profile:
            run = partial(llm.generate, prompts, params, use_tqdm=False)
            print("trace:", traced(llm, "offline", run))
    return records


def _requests(
    args: argparse.Namespace, llm: LLM, rng: random.Random
) -> tuple[list[int | list[int]], list[int]]:
    """Return the prompts, as token ids or as the number of random ones, and the output lengths."""
    count = args.num_prompts
    if args.dataset_path:
        if llm.tokenizer is None:
            raise ValueError("--dataset-path has texts, and the engine runs without a tokenizer")
        path = Path(args.dataset_path)
        encode = partial(llm.tokenizer.encode, add_special_tokens=False)
        if args.dataset_name == "sharegpt":
            found = sharegpt.prompts(path, count, encode, sharegpt_sampling(args, llm.plan.seed))
        else:
            found = custom_prompts(path, count, args.random_output_len, encode)
        return [llm.tokenizer.encode(one.text) for one in found], [one.output_len for one in found]
    ratio = args.random_range_ratio
    lengths = random_lengths(rng, args.random_input_len, ratio, count)
    return [*lengths], random_lengths(rng, args.random_output_len, ratio, count)


def _random_ids(rng: random.Random, llm: LLM, length: int) -> list[int]:
    """Return a prompt of ``length`` random token ids."""
    vocab = llm.plan.facts.model.vocab_size
    return [rng.randrange(vocab) for _ in range(length)]


def _run_once(
    args: argparse.Namespace, llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> dict[str, Any]:
    """Generate all outputs and return the record of the run."""
    from msgspec.structs import asdict

    before = asdict(llm.stats)
    drafts = counted(llm)
    started = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    duration = time.perf_counter() - started
    drafted = acceptance(drafts, counted(llm))  # afterwards the statistics cover the whole run
    generated = sum(len(result.token_ids) for result in done)
    finished = {"length", "stop"} if args.disable_ignore_eos else {"length"}
    return {
        **_record(args, llm.plan.device, [*map(len, prompts)], generated, duration),
        "failed": sum(result.finish_reason not in finished for result in done),
        **drafted,
        "device_idle_share": report.idle_share(before, asdict(llm.stats)),
        **report.startup_times(llm.control("info")),
    }


def _record(
    args: argparse.Namespace, device: str, lengths: list[int], generated: int, duration: float
) -> dict[str, Any]:
    """Return the record of one run.

    Args:
        args: options of the command.
        device: the device.
        lengths: tokens of each prompt.
        generated: generated tokens of all requests.
        duration: seconds of the run.
    """
    count, prompt = len(lengths), sum(lengths)
    return {
        "num_prompts": count,
        "total_input_tokens": prompt,
        "total_output_tokens": generated,
        "duration": duration,
        "request_throughput": count / duration,
        "input_throughput": prompt / duration,
        "output_throughput": generated / duration,
        "total_throughput": (prompt + generated) / duration,
        "runs": args.repeat,
        "device": device,
    }
