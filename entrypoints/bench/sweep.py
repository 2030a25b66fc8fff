"""``glowplug bench sweep``: serving under several settings, and the change in percent.

For each setting a server is started on this machine and measured at every concurrency, with an
empty prefix cache. The defaults are the published sweep of the draft-extend graphs: concurrency 1,
4, 16 and 32 with 5, 20, 80 and 160 requests of 1000 prompt tokens and 1000 output tokens.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glowplug.core.errors import GlowplugError
from glowplug.core.plan.plan import EnginePlan
from glowplug.entrypoints.bench import serving, table
from glowplug.entrypoints.bench.load.local_server import LocalServer
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions_apart
from glowplug.entrypoints.bench.others.drafts import (
    add_simulation_options,
    simulated_rates,
    simulation_settings,
)
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from glowplug.entrypoints.front import event_loop

DRAFT_EXTEND = ("graphs.draft_extend=false", "graphs.draft_extend=true")  #: published settings
COLUMNS = (*table.COLUMNS, "accept_length")
NO_EFFECT = "no effect: "  #: words of a decision on an option that changes nothing
#: figures that ``--max-regression`` limits; more is worse
LIMITED = ("median_ttft_ms", "median_tpot_ms")


@dataclass
class Setting:
    """One setting of the sweep.

    Attributes:
        name: the setting as given: assignments KEY=VALUE, separated by ";".
        config: the engine's configuration; {} if it was refused.
        plan: the plan; None if it was refused.
        error: why it was not measured; empty if it was.
        records: its results, one for each concurrency.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    plan: EnginePlan | None = None
    error: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--vary",
        nargs="+",
        default=list(DRAFT_EXTEND),
        metavar="KEY=VALUE[;KEY=VALUE]",
        help='settings to compare with the first one; "" is the configuration as it is; default: '
        "without and with graphs of draft extend",
    )
    group.add_argument("--max-concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    group.add_argument(
        "--num-prompts",
        type=int,
        nargs="+",
        default=[5, 20, 80, 160],
        help="requests of each concurrency",
    )
    group.add_argument("--random-input-len", "--input-len", type=int, default=1000)
    group.add_argument("--random-output-len", "--output-len", type=int, default=1000)
    group.add_argument("--warmup-requests", type=int, default=1)
    group.add_argument("--bench-seed", type=int, default=1, help="seed of the random prompts")
    group.add_argument(
        "--start-timeout",
        type=float,
        default=1800.0,
        help="seconds that a server may take to start",
    )
    group.add_argument(
        "--max-regression",
        type=float,
        metavar="PERCENT",
        help="exit with 1 if the median TTFT or TPOT of a setting is worse than the first one's "
        "by more than this",
    )
    add_simulation_options(group)
    group.add_argument("--output-file", type=Path, help="append one JSON line per measurement")
    group.add_argument("--save", type=Path, help="write a JSON document of all results and changes")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every setting, and print its table and the changes against the first one.

    Returns:
        Exit status 0; 1 if a setting was refused or failed (its reason is printed and saved), if
            requests failed, or if a change exceeds ``--max-regression``; 2 if the options are
            refused.
    """
    try:
        settings = [_planned(args, name) for name in args.vary]
        _check(args, settings)
    except (GlowplugError, OSError, ValueError) as error:
        print(f"glowplug bench sweep: {error}", file=sys.stderr)
        return 2
    for setting in settings:
        _measure(args, setting)
        _show(setting)
        if args.save:  # after each setting, so that an interrupted run keeps its results
            report.write_json(args.save, document(settings))
    worse = _show_changes(settings, args.max_regression)
    failed = any(record["failed"] for setting in settings for record in setting.records)
    return 1 if worse or failed or any(setting.error for setting in settings) else 0


def _planned(args: argparse.Namespace, name: str) -> Setting:
    """Return the setting ``name`` with its configuration and plan, or with the refusal."""
    given = copy.copy(args)
    varied = (part for part in name.split(";") if part.strip())
    simulated = simulation_settings(simulated_rates(args))
    given.overrides = [*args.overrides, *simulated, *varied]
    try:
        config = engine_config(given)
        return Setting(name, config, read_command_line(given).plan())
    except GlowplugError as error:
        return Setting(name, error=str(error))


def _check(args: argparse.Namespace, settings: Sequence[Setting]) -> None:
    """Raise ValueError if the options give nothing to compare."""
    if len(args.max_concurrency) != len(args.num_prompts):
        raise ValueError("--max-concurrency and --num-prompts need as many values as each other")
    if all(setting.error for setting in settings):
        raise ValueError(settings[0].error)
    plans = [setting.plan for setting in settings if setting.plan is not None]
    if tuple(args.vary) == DRAFT_EXTEND and not plans[0].sizes.draft_extends:
        raise ValueError(
            "the published settings switch the graphs of draft extend, and this engine has no such "
            "pass: choose drafts (--speculative-algorithm NEXTN), or other settings with --vary"
        )


def _measure(args: argparse.Namespace, setting: Setting) -> None:
    """Start a server with the setting and measure it; set the records, or the error."""
    if setting.error:
        return
    print(f"== {setting.name or 'the configuration as it is'}", flush=True)
    for line in _without_effect(setting):
        print(line, file=sys.stderr)
    try:
        with LocalServer(setting.config, timeout=args.start_timeout) as server:
            event_loop.run(_drive(args, setting, _serving_options(args, server.base_url)))
    except (OSError, RuntimeError, ValueError) as error:
        setting.error = str(error)


def _without_effect(setting: Setting) -> list[str]:
    """Return the plan's remarks on keys of the setting that change nothing in it."""
    keys = {part.partition("=")[0].strip() for part in setting.name.split(";")}
    decisions = setting.plan.decisions if setting.plan else ()
    return [
        f"{one.field}: {one.why}" for one in decisions if one.field in keys and NO_EFFECT in one.why
    ]


def _serving_options(args: argparse.Namespace, url: str) -> argparse.Namespace:
    """Return the options of ``bench serving`` for a server of the sweep. ``url``: its address."""
    parser = argparse.ArgumentParser()
    serving.configure(parser)
    words = {
        "--base-url": url,
        "--random-input-len": args.random_input_len,
        "--random-output-len": args.random_output_len,
        "--random-range-ratio": 1,
        "--warmup-requests": args.warmup_requests,
        "--seed": args.bench_seed,
    }
    levels = ["--max-concurrency", *args.max_concurrency, "--num-prompts", *args.num_prompts]
    single = [word for option in words.items() for word in option]
    return parser.parse_args([str(word) for word in (*single, *levels, "--flush-cache")])


async def _drive(args: argparse.Namespace, setting: Setting, options: argparse.Namespace) -> None:
    """Measure a running server at every concurrency and keep the records in ``setting``."""
    async for record, outcomes in serving.runs(options):
        plan = setting.plan
        named = {"setting": setting.name, "plan": plan.fingerprint if plan else None, **record}
        setting.records.append(named)
        for error in sorted({outcome.error for outcome in outcomes if outcome.error})[:5]:
            print(f"failed: {error}", file=sys.stderr)
        if args.output_file:
            report.append_line(args.output_file, named)


def _show(setting: Setting) -> None:
    if setting.error:
        print(f"{setting.name}: {setting.error}", file=sys.stderr, flush=True)
    if setting.records:
        rows = [table.cells(record, COLUMNS) for record in setting.records]
        print(f"{report.table(COLUMNS, rows)}\n", flush=True)


def _show_changes(settings: Sequence[Setting], limit: float | None) -> bool:
    """Print the changes from the first setting to each other one.

    Args:
        settings: the measured settings.
        limit: permitted change of the figures in LIMITED, in percent; None: any.

    Returns:
        Whether a figure exceeds the limit.
    """
    worse = False
    first, *others = settings
    for setting in (one for one in others if one.records and first.records):
        print(f"change in percent, from {first.name!r} to {setting.name!r}")
        print(f"{report.table(COLUMNS, table.changes(first.records, setting.records, COLUMNS))}\n")
        for point in changes(first, setting):
            over = {name: point["percent"].get(name) for name in LIMITED}
            for name, percent in over.items():
                if limit is not None and percent is not None and percent > limit:
                    worse = True
                    print(
                        f"{name} at concurrency {point['max_concurrency']} rose by {percent:.1f}%, "
                        f"more than {limit:g}%",
                        file=sys.stderr,
                    )
    return worse


def changes(first: Setting, other: Setting) -> list[dict[str, Any]]:
    """Return the change in percent of each figure at each concurrency, for the document."""
    found = []
    for before, after in zip(first.records, other.records):
        old, new = (dict(zip(COLUMNS, table.cells(one, COLUMNS))) for one in (before, after))
        found.append(
            {
                "from": first.name,
                "to": other.name,
                "max_concurrency": before["max_concurrency"],
                "percent": {
                    name: percent
                    for name in COLUMNS[1:]
                    if (percent := table.percent(old[name], new[name])) is not None
                },
            }
        )
    return found


def document(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the document that ``--save`` writes: conditions, plans, results and changes."""
    first, *others = settings
    return {
        **conditions_apart(),
        "settings": [
            {
                "setting": setting.name,
                "plan": setting.plan.fingerprint if setting.plan else None,
                "error": setting.error or None,
            }
            for setting in settings
        ],
        "results": [record for setting in settings for record in setting.records],
        "changes": [change for setting in others for change in changes(first, setting)],
    }
