"""``glowplug tune speculative``: the fastest size of the drafts for each batch size.

An engine is started for each size and decodes prompts at each batch size. The file that is written
holds the measurements, the fastest size for each batch size, and the seconds of a step, by which
``speculative.adaptive`` chooses (``speculative.cost_table``). A run is limited in time; the next
run with the same options continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape, shorter_shapes
from glowplug.entrypoints.bench.others.drafts import add_simulation_options, simulated_rates

if TYPE_CHECKING:
    from glowplug.entrypoints.bench.others.draft_settings import DraftSpeed

NAME = "speculative"
SUMMARY = "the size of drafts for each batch size, and the costs for speculative.adaptive"
DEFAULTS: dict[str, Any] = {
    "batch_size": [1, 4, 16, 64],
    "steps": [1, 3, 5],
    "topk": [1, 4],
    "num_draft_tokens": [2, 4, 6, 8],
    "num_prompts": 16,
    "prompts": None,
    "output_len": 64,
    "output": Path("draft_costs.json"),
}
#: (batch size, size of the drafts) -> record of the measurement
Records = dict[tuple[int, DraftShape], dict[str, Any]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this tuner. They have no defaults, so that given ones are noticed."""
    group = parser.add_argument_group(f"tune {NAME}")
    for name, what in (
        ("batch-size", "numbers of requests at a time"),
        ("steps", "numbers of draft passes"),
        ("topk", "branches of a pass; 1: chains"),
        ("num-draft-tokens", "tokens verified per step"),
    ):
        default = " ".join(map(str, DEFAULTS[name.replace("-", "_")]))
        group.add_argument(f"--{name}", type=int, nargs="+", help=f"{what}; default: {default}")
    group.add_argument(
        "--num-prompts",
        type=int,
        help=f"requests at each batch size, at least one batch; default: {DEFAULTS['num_prompts']}",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSON lines with {"prompt": text}; default: short built-in questions',
    )
    group.add_argument(
        "--output-len",
        type=int,
        help=f"tokens to generate for each request; default: {DEFAULTS['output_len']}",
    )
    add_simulation_options(group)
    group.add_argument(
        "--output", type=Path, metavar="FILE", help=f"file to write; default: {DEFAULTS['output']}"
    )


def given_options(args: argparse.Namespace) -> list[str]:
    """Return the options of this tuner that are set."""
    names = (*DEFAULTS, "simulate_accept_length", "simulate_accept_rates")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]


def run(args: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """Measure what the file does not hold yet, write it, and print the table.

    Returns:
        0, also if the time limit ended the measurements; 2 if nothing could be measured.
    """
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    shapes = _shapes(args)
    about = _about(args, config)
    records = _stored(args.output, about)
    deadline = time.monotonic() + args.max_minutes * 60
    for shape in shapes:
        missing = [rows for rows in sorted(args.batch_size) if (rows, shape) not in records]
        if missing and time.monotonic() > deadline:
            print(f"out of time before drafts {shape}; run the same command again to continue")
            break
        try:
            _measure(args, config, shape, missing, records)
        except GlowplugError as error:
            if shape == NO_DRAFTS:
                raise
            print(f"drafts {shape} are left out: {error}", file=sys.stderr)
        _write(args.output, about, records)
    _show(args, records)
    return 0 if records else 2


def _shapes(args: argparse.Namespace) -> list[DraftShape]:
    """Return the sizes of the drafts to measure, ascending: those of the knobs, and smaller ones.

    Raises:
        ValueError: there is none, or an option is too small.
    """
    from glowplug.entrypoints.bench.others.draft_settings import settings

    sizes = settings(args.steps, args.topk, args.num_draft_tokens)
    if not sizes or min(args.batch_size) < 1 or args.output_len < 2 or args.num_prompts < 1:
        raise ValueError("nothing to measure: no size of drafts, or a number below 1")
    found = {shape for full in sizes for shape in shorter_shapes(full)}
    return sorted(found, key=lambda shape: (shape.tokens, shape.steps))


def _about(args: argparse.Namespace, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the measurements in a file have in common."""
    kept = {name: value for name, value in config.items() if name != NAME}
    found = {
        "config": kept,
        NAME: dict(config.get(NAME, {})),
        "prompts": str(args.prompts or "built-in questions"),
        "num_prompts": args.num_prompts,
        "output_len": args.output_len,
        "simulated_rates": simulated_rates(args),
    }
    return dict(json.loads(json.dumps(found, default=str)))


def _stored(path: Path, about: dict[str, Any]) -> Records:
    """Return the measurements in the file, {} if it does not exist.

    Raises:
        ValueError: the file holds other measurements.
    """
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text())
        records = {
            (one["batch_size"], DraftShape(one["steps"], one["topk"], one["draft_tokens"])): one
            for one in stored["measured"]
        }
        same = stored["about"] == about
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of draft costs: give another --output") from error
    if not same:
        raise ValueError(
            f"{path} was measured with other options: remove it, or give another --output"
        )
    return records


def _measure(
    args: argparse.Namespace,
    config: Mapping[str, Any],
    shape: DraftShape,
    batch_sizes: list[int],
    records: Records,
) -> None:
    """Start an engine with drafts of one size and measure each batch size."""
    from glowplug.entrypoints.bench.others.draft_settings import (
        WARM_TOKENS,
        drafting_config,
        measure_drafts,
        read_prompts,
    )
    from glowplug.entrypoints.front.llm import LLM

    if not batch_sizes:
        return
    rates = simulated_rates(args)
    with LLM(**drafting_config(dict(config), shape, max(batch_sizes), rates)) as llm:
        prompts = read_prompts(llm, args.prompts, max(args.num_prompts, *batch_sizes))
        length = min(args.output_len, llm.plan.sizes.context_length - max(map(len, prompts)))
        for rows in batch_sizes:
            used = prompts[: max(args.num_prompts, rows) // rows * rows]
            measure_drafts(llm, used[:rows], rows, min(length, WARM_TOKENS), shape.tokens)
            speed = measure_drafts(llm, used, rows, length, shape.tokens)
            records[rows, shape] = _record(rows, shape, speed)
            print(_measured(rows, shape, speed), flush=True)


def _measured(rows: int, shape: DraftShape, speed: DraftSpeed) -> str:
    """Return a measurement as a line of text."""
    return (
        f"batch size {rows}, drafts {shape}: {speed.tokens_per_s:.1f} tokens/s, "
        f"accept length {speed.accept_length:.2f}"
    )


def _record(rows: int, shape: DraftShape, speed: DraftSpeed) -> dict[str, Any]:
    """Return the record of a measurement."""
    return {
        "batch_size": rows,
        "steps": shape.steps,
        "topk": shape.topk,
        "draft_tokens": shape.tokens,
        "accept_length": round(speed.accept_length, 3),
        "step_seconds": speed.step_seconds,
        "tokens_per_s": round(speed.tokens_per_s, 2),
    }


def costs_of(records: Records) -> DraftCosts:
    """Return the seconds of a step by size of the drafts; more rows cost no less than fewer."""
    entries = []
    for shape in dict.fromkeys(shape for _, shape in records):
        rows = sorted(rows for rows, other in records if other == shape)
        seconds = accumulate((records[count, shape]["step_seconds"] for count in rows), max)
        entries.append(ShapeCosts(shape, tuple(rows), tuple(seconds)))
    return DraftCosts(tuple(entries))


def choices_of(records: Records) -> dict[int, DraftShape]:
    """Return the fastest size of the drafts for each batch size, ascending."""
    return {
        rows: max(
            (shape for count, shape in records if count == rows),
            key=lambda shape: records[rows, shape]["tokens_per_s"],
        )
        for rows in sorted({rows for rows, _ in records})
    }


def _write(path: Path, about: dict[str, Any], records: Records) -> None:
    from glowplug.entrypoints.bench.others.report import write_json

    choices = {str(rows): str(shape) for rows, shape in choices_of(records).items()}
    document = {
        "about": about,
        "fastest": choices,
        "measured": list(records.values()),
        **costs_of(records).to_json(),
    }
    write_json(path, document)


def _show(args: argparse.Namespace, records: Records) -> None:
    """Print the fastest size for each batch size, and how to use the file."""
    from glowplug.entrypoints.bench.others.report import table

    lines = []
    for rows, shape in choices_of(records).items():
        best = records[rows, shape]
        plain = records.get((rows, NO_DRAFTS), best)
        lines.append(
            [rows, str(shape), best["accept_length"], best["tokens_per_s"], plain["tokens_per_s"]]
        )
    columns = ("batch size", "fastest drafts", "accept length", "tokens/s", "without drafts")
    print(table(columns, lines))
    full = max(choices_of(records).values(), key=lambda shape: shape.tokens, default=NO_DRAFTS)
    if not full.steps:
        print("drafts of any of these sizes are slower than none")
    else:
        knobs = f"steps = {full.steps}, topk = {full.topk}, draft_tokens = {full.tokens}"
        print(f'speculative: {knobs}, cost_table = "{args.output}"')
