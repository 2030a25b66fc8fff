"""``glowplug bench compare-transformers``: this engine and transformers' generate in one run.

Both sides run the same checkpoint in float32 on the CPU with the same number of threads. They
alternate within each round and generate the same number of greedy tokens from the same random
prompts. The results are medians over the rounds. The last part serves the same requests over HTTP
and compares the throughput with that of the offline engine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError
from glowplug.core.step.draft_counts import DraftCounts
from glowplug.entrypoints.bench.load.backends import BACKENDS, Request
from glowplug.entrypoints.bench.load.datasets import BenchPrompt
from glowplug.entrypoints.bench.load.http_stream import ServerTarget, call
from glowplug.entrypoints.bench.load.load import Load, drive
from glowplug.entrypoints.bench.load.local_server import MODEL, LocalServer
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.drafts import acceptance, counted
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.front import event_loop

if TYPE_CHECKING:
    from glowplug.entrypoints.bench.others.transformers_side import TransformersSide
    from glowplug.entrypoints.front.llm import LLM

Ids = list[list[int]]


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison")
    group.add_argument("--input-len", type=int, default=64)
    group.add_argument("--output-len", type=int, default=64)
    group.add_argument(
        "--concurrency",
        type=int,
        default=16,
        help="requests at once on our side; transformers runs them one by one",
    )
    group.add_argument(
        "--reference-requests",
        type=int,
        help="requests that transformers runs one by one; default: as many as --concurrency",
    )
    group.add_argument("--repeat", type=int, default=3, help="rounds; medians are reported")
    group.add_argument(
        "--threads", type=int, help="torch threads of both sides; default: torch's default"
    )
    group.add_argument("--skip-serving", action="store_true", help="skip the comparison over HTTP")
    group.add_argument(
        "--result-filename",
        "--output-file",
        default=None,
        metavar="FILE",
        help="write JSON to this file",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compare the engines, print the figures, and return the exit status.

    Returns:
        0; 2 if the model or an option is refused, or a run failed.
    """
    try:
        config = {**engine_config(args), "dtype": "float32", "device": "cpu"}
        result = compare(args, config)
    except (GlowplugError, ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(
        "\n".join(
            report.line(key, value) for key, value in result.items() if not isinstance(value, dict)
        )
    )
    if args.result_filename:
        report.write_json(Path(args.result_filename), result)
    return 0


def compare(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Measure this engine and Transformers; return the record.

    The rates in the record are in output tokens per second.
    """
    import torch

    from glowplug.entrypoints.front.llm import LLM

    if args.threads:
        torch.set_num_threads(args.threads)
    with LLM(**config, skip_tokenizer=True) as llm:
        rng = random.Random(llm.plan.seed)
        vocab = llm.plan.facts.model.vocab_size
        rounds = [
            [[rng.randrange(vocab) for _ in range(args.input_len)] for _ in range(args.concurrency)]
            for _ in range(args.repeat + 1)
        ]
        result = _conditions(args, llm) | _compare_rounds(args, llm, rounds)
        if not args.skip_serving:
            result |= _serving(args, llm, config, rounds[1:])
    return result


def _compare_rounds(args: argparse.Namespace, llm: LLM, rounds: list[Ids]) -> dict[str, Any]:
    """Measure both engines round by round on the same prompts.

    Returns:
        Median rates in output tokens per second, the ratios, and the share of equal greedy tokens.
    """
    from glowplug.entrypoints.bench.others.transformers_side import TransformersSide

    other = TransformersSide(llm.plan.facts.model.path)
    warm_up, *measured = rounds
    drafts = _warm_up(args, llm, other, warm_up)
    rates: dict[str, list[float]] = {}
    agreements = []
    for prompts in measured:
        found, agreement = _measure_round(args, llm, other, prompts)
        agreements.append(agreement)
        for name, value in found.items():
            rates.setdefault(name, []).append(value)
    medians = {name: median(values) for name, values in rates.items()}
    return {
        "transformers": other.version,
        **{f"{name}_tokens_per_s": value for name, value in medians.items()},
        "speedup_batch1": medians["ours_batch1"] / medians["theirs_batch1"],
        "speedup_concurrent": medians["ours_concurrent"] / medians["theirs_one_by_one"],
        "equal_prefix_of_greedy_tokens": median(agreements),
        **acceptance(drafts, counted(llm)),
        "all_rates": rates,
    }


def _warm_up(
    args: argparse.Namespace, llm: LLM, other: TransformersSide, prompts: Ids
) -> Sequence[DraftCounts]:
    """Run prompts of the measured sizes on both engines.

    Returns:
        Counters of this engine's drafts so far.
    """
    _generate(llm, prompts[:1], args.output_len)
    other.generate(prompts[0], args.output_len)
    _generate(llm, prompts, args.output_len)
    return counted(llm)


def _measure_round(
    args: argparse.Namespace, llm: LLM, other: TransformersSide, prompts: Ids
) -> tuple[dict[str, float], float]:
    """Measure both engines on one round of prompts.

    Returns:
        Rates in output tokens per second, and the share of equal greedy tokens.
    """
    one, tokens = _generate(llm, prompts[:1], args.output_len)
    expected, seconds = other.generate(prompts[0], args.output_len)
    many, _ = _generate(llm, prompts, args.output_len)
    reference_prompts = prompts[: args.reference_requests or len(prompts)]
    rates = {
        "ours_batch1": one,
        "theirs_batch1": args.output_len / seconds,
        "ours_concurrent": many,
        "theirs_one_by_one": _one_by_one(other, reference_prompts, args.output_len),
    }
    return rates, _agreement(tokens[0], expected)


def _generate(llm: LLM, prompts: Ids, count: int) -> tuple[float, Ids]:
    """Run one ``generate`` call with an empty prefix cache.

    Returns:
        (output tokens per second, the output tokens of each prompt).
    """
    from glowplug.core.step.request import SamplingParams

    llm.control("flush")
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    started = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return len(prompts) * count / seconds, [result.token_ids for result in results]


def _one_by_one(transformers_side: TransformersSide, prompts: Ids, count: int) -> float:
    return (
        len(prompts)
        * count
        / sum(transformers_side.generate(prompt, count)[1] for prompt in prompts)
    )


def _agreement(ours: list[int], expected: list[int]) -> float:
    """Return the share of ``expected`` tokens before the first difference in ``ours``."""
    same = 0
    for left, right in zip(ours, expected):
        if left != right:
            break
        same += 1
    return same / len(expected)


def _serving(
    args: argparse.Namespace, llm: LLM, config: dict[str, Any], rounds: list[Ids]
) -> dict[str, Any]:
    """Measure the same requests on ``llm`` and through a glowplug server, alternately."""
    offline = []
    served = []
    with LocalServer(config, threads=args.threads) as server:
        target = ServerTarget(server.base_url)
        _served(target, rounds[0], args.output_len)  # warm-up
        for prompts in rounds:
            offline.append(_generate(llm, prompts, args.output_len)[0])
            served.append(_served(target, prompts, args.output_len))
    return {
        "offline_tokens_per_s": median(offline),
        "serving_tokens_per_s": median(served),
        "serving_cost": 1.0 - median(served) / median(offline),
    }


def _served(target: ServerTarget, prompts: Ids, count: int) -> float:
    """Send the prompts to a server whose prefix cache is empty, and measure its rate.

    Returns:
        Output tokens per second.

    Raises:
        RuntimeError: a request failed.
    """
    requests = [BenchPrompt(len(ids), count, ids=ids) for ids in prompts]
    status, body = event_loop.run(call(target, "POST", "/flush_cache", {}))
    if status != 200:
        raise RuntimeError(
            f"POST /flush_cache answered {status}: {body.decode(errors='replace')[:300]}"
        )
    outcomes, seconds = event_loop.run(
        drive(target, BACKENDS["glowplug"], Request(MODEL), requests, Load(), lambda: None)
    )
    failed = [outcome.error for outcome in outcomes if not outcome.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} served requests failed: {failed[0]}")
    return sum(outcome.output_tokens for outcome in outcomes) / seconds


def _conditions(args: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    """Return the conditions of the measurement for the record.

    The conditions are model, device, versions and the command's options.
    """
    import platform

    import torch

    plan = llm.plan
    return {
        "model": plan.model,
        "architecture": plan.facts.model.architecture,
        "dtype": plan.dtype,
        "device": plan.device,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "input_len": args.input_len,
        "output_len": args.output_len,
        "concurrency": args.concurrency,
        "rounds": args.repeat,
    }
