"""``glowplug bench speculative``: speed and accept length for each size of the drafts.

The options are those of SGLang's ``bench_speculative.py``: an engine is started for each
combination of batch size, steps, topk and draft tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions_apart
from glowplug.entrypoints.bench.others.draft_settings import (
    WARM_TOKENS,
    DraftSpeed,
    drafting_config,
    measure_drafts,
    read_prompts,
    settings,
)
from glowplug.entrypoints.bench.others.drafts import add_simulation_options, simulated_rates
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.cli.flags.arguments import add_engine_options

COLUMNS = (
    "batch_size",
    "steps",
    "topk",
    "num_draft_tokens",
    "accept_length",
    "step_ms",
    "tokens_per_s",
)


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafts")
    group.add_argument(
        "--batch-size",
        "--parallel",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16],
        help="numbers of requests at a time",
    )
    add_knobs(group, "0, 0, 0 is measured too, if all three lists have it: no drafts")
    group.add_argument(
        "--num-prompts", type=int, default=16, help="requests of each combination, at least a batch"
    )
    add_prompt_options(group, 512)
    add_simulation_options(group)
    group.add_argument(
        "--start", type=int, default=0, help="number of the first combination to measure"
    )
    group.add_argument("--end", type=int, default=None, help="number after the last combination")
    group.add_argument(
        "--output",
        type=Path,
        default=Path("output.jsonl"),
        metavar="FILE",
        help="append one JSON line for each combination",
    )
    add_engine_options(parser)


def add_knobs(group: Any, more: str) -> None:
    """Add the lists of knobs to ``group``; ``more`` is added to the help of steps."""
    group.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[0, 1, 3, 5, 7],
        help=f"numbers of draft passes; {more}",
    )
    group.add_argument(
        "--topk", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="branches of a pass; 1: chains"
    )
    group.add_argument(
        "--num_draft_tokens",
        "--num-draft-tokens",
        type=int,
        nargs="+",
        default=[0, 2, 4, 8, 16, 32],
        help="tokens verified per step, the last accepted one included",
    )


def add_prompt_options(group: Any, output_len: int) -> None:
    """Add the options of the requests to ``group``; ``output_len`` is the default length."""
    group.add_argument(
        "--prompts",
        type=Path,
        default=None,
        metavar="FILE",
        help='JSON lines with {"prompt": text}; default: short built-in questions',
    )
    group.add_argument(
        "--output-len",
        type=int,
        default=output_len,
        help="tokens to generate for each request, as far as the context length allows",
    )


def run(args: argparse.Namespace) -> int:
    """Measure every combination and print the table.

    Returns:
        Exit status 0; 1 if a combination was refused or failed (its record has the reason); 2 if
            the options are refused.
    """
    try:
        config = engine_config(args)
        simulated_rates(args)  # refused before an engine starts
        chosen = _combinations(args)
    except (GlowplugError, OSError, ValueError) as error:
        print(f"glowplug bench speculative: {error}", file=sys.stderr)
        return 2
    records = []
    for number, rows, shape in chosen:
        print(f"{number}: batch size {rows}, {described(shape)}", flush=True)
        records.append(_record(args, config, rows, shape))
        report.append_line(args.output, {**records[-1], "conditions": conditions_apart()})
    lines = [[found.get(column, "-") for column in COLUMNS] for found in records]
    print(report.table(COLUMNS, lines))
    return 1 if any("error" in found for found in records) else 0


def _combinations(args: argparse.Namespace) -> list[tuple[int, int, DraftShape]]:
    """Return (number, batch size, size of the drafts) of each combination to measure.

    Raises:
        ValueError: there is none, or an option is too small.
    """
    shapes = settings(args.steps, args.topk, args.num_draft_tokens)
    every = list(enumerate(itertools.product(args.batch_size, shapes)))
    chosen = [(number, rows, shape) for number, (rows, shape) in every[args.start : args.end]]
    if not chosen or min(args.batch_size) < 1 or args.output_len < 2 or args.num_prompts < 1:
        raise ValueError(
            f"nothing to measure: {len(every)} combinations; batch sizes and prompts are at least "
            "1, --output-len at least 2"
        )
    return chosen


def described(shape: DraftShape) -> str:
    """Return the size of the drafts as text: steps/topk/tokens."""
    return f"drafts {shape} (steps/topk/tokens)" if shape.steps else "no drafts"


def _record(
    args: argparse.Namespace, config: dict[str, Any], rows: int, shape: DraftShape
) -> dict[str, Any]:
    """Measure one combination and return its record: SGLang's keys, then our own.

    If the engine refuses or fails, the record has the reason in place of the numbers.
    """
    knobs = (shape.topk, shape.tokens) if shape.steps else (0, 0)
    found: dict[str, Any] = {
        "batch_size": rows,
        "steps": shape.steps,
        "topk": knobs[0],
        "num_draft_tokens": knobs[1],
    }
    try:
        return {**found, **_figures(_speed(args, config, rows, shape), rows)}
    except GlowplugError as error:
        print(error, file=sys.stderr)
        return {**found, "error": str(error)}


def _speed(
    args: argparse.Namespace, config: dict[str, Any], rows: int, shape: DraftShape
) -> DraftSpeed:
    """Start an engine for one combination and return its speed, after a warm-up."""
    from glowplug.entrypoints.front.llm import LLM

    with LLM(**drafting_config(config, shape, rows, simulated_rates(args))) as llm:
        prompts = read_prompts(llm, args.prompts, max(args.num_prompts, rows))
        room = llm.plan.sizes.context_length - max(map(len, prompts))
        length = min(args.output_len, room)
        measure_drafts(llm, prompts[:rows], rows, min(length, WARM_TOKENS), shape.tokens)
        return measure_drafts(llm, prompts, rows, length, shape.tokens)


def _figures(speed: DraftSpeed, rows: int) -> dict[str, float]:
    """Return the figures of a record."""
    return {
        "acc_length": round(speed.accept_length, 3),
        "step_time": round(speed.step_seconds, 6),
        "speed": round(speed.tokens_per_s / rows, 3),
        "completion_tokens": speed.output_tokens,
        "accept_length": round(speed.accept_length, 3),
        "step_ms": round(1e3 * speed.step_seconds, 3),
        "tokens_per_s": round(speed.tokens_per_s, 2),
    }
