"""``glowplug tune parallel``: the concurrent requests from which a strategy's size is faster.

The layout of the command line is measured without the strategy, and with it in each size, in
engines of their own. With ``--save-table`` the speeds become the table by which plans decide the
size "auto" of the strategy.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from glowplug.core.facts.layout_speed import compared, faster_from
from glowplug.core.plugin.offers import ParallelOffers
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.startup.components import write_layout_table
from glowplug.core.startup.lone_rank import number_of_ranks
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions_apart
from glowplug.entrypoints.bench.ranks.layouts import (
    LayoutLoad,
    MeasuredLayouts,
    layout_config,
    measure_layouts,
)

NAME = "parallel"
SUMMARY = "the concurrent requests from which DP attention is faster than tensor parallelism"
DEFAULTS: dict[str, Any] = {
    "concurrency": [1, 8, 32, 64, 128, 256],
    "groups": None,
    "input_len": 512,
    "output_len": 128,
    "repeat": 3,
    "save_table": False,
    "output": None,
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this tuner has. They have no defaults, as ``given_options`` needs.

    The other options of ``DEFAULTS`` are those of ``tune speculative``.
    """
    group = parser.add_argument_group(
        f"tune {NAME}", f"--output-len (default: {DEFAULTS['output_len']}) and --output, too"
    )
    requests = " ".join(map(str, DEFAULTS["concurrency"]))
    group.add_argument(
        "--concurrency", type=int, nargs="+", help=f"concurrent requests; default: {requests}"
    )
    group.add_argument(
        "--groups",
        type=int,
        nargs="+",
        help="numbers of groups to compare with none; default: that of --dp-size, or one a rank",
    )
    group.add_argument(
        "--input-len", type=int, help=f"tokens of a prompt; default: {DEFAULTS['input_len']}"
    )
    group.add_argument(
        "--repeat", type=int, help=f"runs at each number of requests; default: {DEFAULTS['repeat']}"
    )
    group.add_argument(
        "--save-table",
        action="store_true",
        default=None,
        help='keep the speeds as the table by which plans decide dp_attention\'s size = "auto"',
    )


def given_options(args: argparse.Namespace) -> list[str]:
    """Return the options of this tuner that are set."""
    return [f"--{name.replace('_', '-')}" for name in DEFAULTS if getattr(args, name) is not None]


def run(args: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """Measure the layouts, print speeds and switch points, and write the table if it is wanted.

    Returns:
        0; 1 if a layout failed, 2 if none could be compared.
    """
    load = _load(args, config)
    plugins = load_plugins(extra=tuple(config.get("plugins", ())))
    strategy = _strategy(plugins)
    sizes = _sizes(args, config, plugins, strategy)
    configs = {
        size: layout_config(config, strategy, size, max(load.concurrency)) for size in (1, *sizes)
    }

    def show(size: int, text: str) -> None:
        print(f"{_layout(strategy, size)}, {text}", flush=True)

    found = measure_layouts(configs, load, show)
    record = conditions_apart() | {
        "strategy": strategy,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "runs": load.repeat,
        "speeds": found.speeds,
        "failed": found.failed,
    }
    if args.output:
        report.write_json(args.output, record)
    return _report(args, plugins, record, found, sizes)


def _load(args: argparse.Namespace, config: Mapping[str, Any]) -> LayoutLoad:
    """Set the defaults of options that are not given, and return the requests to measure with.

    Raises:
        ValueError: there are none, or more than the engine may run at a time.
    """
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    load = LayoutLoad(sorted(set(args.concurrency)), args.input_len, args.output_len, args.repeat)
    if min(*load.concurrency, load.input_len, load.output_len, load.repeat) < 1:
        raise ValueError("--concurrency, --input-len, --output-len and --repeat are at least 1")
    limit = config.get("scheduler", {}).get("max_running_requests")
    most = max(load.concurrency)
    if isinstance(limit, int) and limit < most:
        raise ValueError(
            f"--concurrency {most} exceeds scheduler.max_running_requests = {limit}: leave the "
            "limit out, or measure fewer requests"
        )
    return load


def _strategy(plugins: PluginSet) -> str:
    """Return the name of the strategy whose size may be "auto".

    Raises:
        ValueError: no plugin registers one.
    """
    for found in plugins.components("parallel"):
        offers = found.component.offers
        if isinstance(offers, ParallelOffers) and offers.auto_size is not None:
            return found.component.name
    raise ValueError("no strategy has a size that is decided by measured speeds")


def _sizes(
    args: argparse.Namespace, config: Mapping[str, Any], plugins: PluginSet, strategy: str
) -> list[int]:
    """Return the sizes of the strategy to measure, ascending.

    Raises:
        ValueError: the configuration has one rank, or no size is above 1.
    """
    ranks = number_of_ranks(config, plugins)
    if ranks == 1:
        raise ValueError(f"{NAME} compares layouts of several ranks: give --tp N")
    given = [
        section["size"]
        for section in config.get("parallel", [])
        if section.get("use") == strategy and isinstance(section.get("size"), int)
    ]
    sizes = sorted({*(args.groups or given or [ranks])} - {1})
    if not sizes or sizes[0] < 1:
        raise ValueError("--groups needs numbers from 2 on")
    return sizes


def _report(
    args: argparse.Namespace,
    plugins: PluginSet,
    record: Mapping[str, Any],
    found: MeasuredLayouts,
    sizes: list[int],
) -> int:
    """Print speeds and switch points, write the table if it is wanted, and return the status."""
    strategy: str = record["strategy"]
    if found.speeds:
        print(report.table(_columns(strategy, sizes), _rows(found, sizes)))
    if found.plan is None or not any(compared(found.speeds, size) for size in sizes):
        print("nothing was compared: the layouts have no number of requests in common")
        return 2
    for size in sizes:
        print(_switch_point(strategy, size, found))
    if args.save_table:
        print(f"table: {write_layout_table(plugins, found.plan, record)}")
    return 1 if found.failed else 0


def _layout(strategy: str, size: int) -> str:
    """Return the name of a layout for messages."""
    return f"{strategy} {size}" if size > 1 else f"without {strategy}"


def _columns(strategy: str, sizes: list[int]) -> list[str]:
    """Return the heads of the table's columns."""
    found = ["requests", f"{_layout(strategy, 1)}, tokens/s"]
    for size in sizes:
        found += [f"{_layout(strategy, size)}, tokens/s", "ratio"]
    return found


def _rows(found: MeasuredLayouts, sizes: list[int]) -> list[list[object]]:
    """Return the table's rows, one for each number of requests."""
    lines = []
    for requests, row in sorted(found.speeds.items()):
        plain = row.get(1)
        line: list[object] = [requests, _shown(plain)]
        for size in sizes:
            speed = row.get(size)
            line += [_shown(speed), f"{speed / plain:.2f}" if speed and plain else "-"]
        lines.append(line)
    return lines


def _shown(speed: float | None) -> str:
    """Return a speed as text; "-" if it was not measured."""
    return "-" if speed is None else f"{speed:.1f}"


def _switch_point(strategy: str, size: int, found: MeasuredLayouts) -> str:
    """Return the switch point of a size as a line of text."""
    layout = _layout(strategy, size)
    requests = compared(found.speeds, size)
    if not requests:
        return f"{layout} was not compared"
    point = faster_from(found.speeds, size)
    if point is None:
        return f"{layout} is not faster with {requests[-1]} requests, the most that were compared"
    return f"{layout} is faster from {point} requests"
