"""``glowplug tune NAME``: measure kernels for a model's shapes on this card and keep what is
fastest.

Bounded in time and resumable: each measurement is written at once, and the next run goes on where
this one stopped. With several GPUs each takes its share of the tables, in a process of its own;
with ``--ray``, those of a Ray cluster.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from glowplug.core.errors import ConfigError, GlowplugError, PluginLoadError, Refusal
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.component import Tuner
from glowplug.core.plugin.loading import import_factory
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols.tuning import TableTuner, TuneTable
from glowplug.core.startup.layer_shapes import layer_shapes
from glowplug.entrypoints.checkpoints.cut_model import model_config, write_cut
from glowplug.entrypoints.cli.flags import add_engine_options, read_command_line
from glowplug.entrypoints.cli.tune_workers import run_workers

ELSEWHERE = Refusal(
    "tune",
    "--facts",
    "tables are measured on this machine's card, not on a fact sheet's",
    "leave --facts out, or use `glowplug check`",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tuner", nargs="?", help="which one; none: list them")
    group = parser.add_argument_group("tuning")
    group.add_argument(
        "--max-minutes", type=float, default=10.0, help="stop after so long; run again to go on"
    )
    group.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[],
        help="numbers of tokens; default: the tuner's own",
    )
    group.add_argument("--tables", nargs="+", default=[], metavar="LABEL", help="only these tables")
    group.add_argument(
        "--list", action="store_true", dest="only_list", help="show the tables and measure nothing"
    )
    group.add_argument("--gpus", type=int, default=1, help="GPUs to share the tables out to")
    group.add_argument(
        "--ray", action="store_true", help="take the GPUs from a Ray cluster (RAY_ADDRESS)"
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 (also when time ran out, which is said); 2: no such tuner, or the model is
    refused.
    """
    try:
        given = read_command_line(args)
        refusals = [*given.layer.refusals, *([ELSEWHERE] if args.facts else [])]
        if refusals:
            raise ConfigError(refusals, given.source)
        found = {
            tuner.name: (tuner, plugin)
            for plugin, tuners in given.plugins.call_each("tuners")
            for tuner in tuners or ()
        }
        if args.tuner is None:
            print("\n".join(f"{tuner.name:<12} {tuner.summary}" for tuner, _ in found.values()))
            return 0
        if args.tuner not in found:
            raise ValueError(
                f"no tuner {args.tuner!r}; there are: {', '.join(sorted(found)) or 'none'}"
            )
        with tempfile.TemporaryDirectory(prefix="glowplug-tune-") as folder:
            return _tune(args, *found[args.tuner], given.config, given.plugins, Path(folder))
    except (GlowplugError, ValueError) as error:
        print(f"glowplug tune: {error}", file=sys.stderr)
        return 2


def _tune(
    args: argparse.Namespace,
    found: Tuner,
    plugin: str,
    config: Mapping[str, Any],
    plugins: PluginSet,
    folder: Path,
) -> int:
    started = time.monotonic()
    plan = _plan(config, plugins, folder)
    factory = _factory(found, plugin)
    tuner = factory(plan)
    shapes = layer_shapes(plan, plugins)
    rows = tuple(args.rows)
    tables = _asked(tuner.tables(shapes, rows), args.tables)
    if args.only_list or not tables:
        _show(tables, "run it without --list")
        return 0 if tables else _nothing(args.tuner)
    if found.device not in ("", plan.device) and not args.ray:
        raise ValueError(
            f"{found.name} measures on {found.device}, and here the device is {plan.device}: run it where "
            "the model will be served, add --ray for the GPUs of a cluster, or --list to see the tables"
        )
    seconds = args.max_minutes * 60 - (time.monotonic() - started)
    if args.gpus > 1 or args.ray:
        run_workers(
            [table.label for table in tables if table.missing], args.gpus, seconds, args.ray
        )
    else:
        _measure(tuner, tables, seconds)
    labels = {table.label for table in tables}
    _show([table for table in tuner.tables(shapes, rows) if table.label in labels])
    return 0


def _factory(found: Tuner, plugin: str) -> Callable[[EnginePlan], TableTuner]:
    """The tuner's class. PluginLoadError; ValueError naming the package that is missing."""
    try:
        return import_factory(found, plugin)
    except PluginLoadError as error:
        cause = error.__cause__
        package = (
            (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        )
        if package in ("", "glowplug"):
            raise
        raise ValueError(
            f"{found.name} needs {package}, which is not installed: pip install {package}"
        ) from error


def _asked(tables: list[TuneTable], labels: list[str]) -> list[TuneTable]:
    """Tables of these labels, or all. ValueError for a label that this model does not have."""
    known = {table.label for table in tables}
    unknown = [label for label in labels if label not in known]
    if unknown and known:
        raise ValueError(f"no table {unknown[0]!r}; this model has: {', '.join(sorted(known))}")
    return [table for table in tables if not labels or table.label in labels]


def _plan(config: Mapping[str, Any], plugins: PluginSet, folder: Path) -> EnginePlan:
    """The plan of the model cut to one layer of each kind, whose products are those of the whole."""
    write_cut(model_config(str(config.get("model", "embedded")), plugins), folder)
    return make_plan(
        {
            "context_length": 256,
            **config,
            "model": str(folder),
            "skip_tokenizer": True,
            "weights": {"use": "random"},
            "executor": {"use": "inline"},
        },
        plugins=plugins,
        source="tune",
    )


def _measure(tuner: TableTuner, tables: list[TuneTable], seconds: float) -> None:
    """What is left of the time is shared out evenly among the tables that still lack something."""
    deadline = time.monotonic() + seconds
    open_ = [table for table in tables if table.missing]
    for number, table in enumerate(open_):
        share = (deadline - time.monotonic()) / (len(open_) - number)
        if share <= 0:
            print(f"out of time before {table.label}", flush=True)
            return
        print(
            f"{table.label}: {len(table.missing)} of {len(table.rows)} to measure, {share:.0f} s",
            flush=True,
        )
        tuner.tune(table, share, lambda line: print(f"  {line}", flush=True))


def _nothing(name: str) -> int:
    print(f"this model has nothing for {name} to tune")
    return 0


def _show(tables: list[TuneTable], how: str = "run the same command again to go on") -> None:
    for table in tables:
        left = f", missing {', '.join(map(str, table.missing))}" if table.missing else ""
        print(
            f"{table.label}: {len(table.rows) - len(table.missing)} of {len(table.rows)} in {table.path}{left}"
        )
    if any(table.missing for table in tables):
        print(f"not complete: {how}")
