"""``glowplug tune NAME``: measure kernels for a model's shapes on this GPU and keep the fastest.

A run is limited in time and resumable: each measurement is written at once, and the next run
continues where the last one stopped. With several GPUs the tables are divided among processes, one
per GPU; with ``--ray`` the GPUs are those of a Ray cluster.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from glowplug.core.errors import ConfigError, GlowplugError, PluginLoadError, Refusal
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.component import Tuner
from glowplug.core.plugin.loading import import_factory
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols.tuning import TableTuner, TuneTable
from glowplug.core.startup.layer_shapes import layer_shapes
from glowplug.core.startup.lone_rank import plan_of_ranks
from glowplug.entrypoints.checkpoints.cut_model import model_config, write_cut
from glowplug.entrypoints.cli import tune_parallel, tune_published, tune_speculative
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from glowplug.entrypoints.cli.tune_workers import run_workers

#: tuners that measure whole engines, by name
ENGINE_TUNERS = {tuner.NAME: tuner for tuner in (tune_speculative, tune_parallel)}
MINUTES = 10.0  #: default time limit
FACTS_REFUSED = Refusal(
    "tune",
    "--facts",
    "tables are measured on this machine's GPU, not on a fact sheet's",
    "remove --facts, or run `glowplug check`",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tuner", nargs="?", help="name of the tuner; without it, the tuners are listed"
    )
    group = parser.add_argument_group("tuning")
    group.add_argument(
        "--max-minutes",
        type=float,
        help=f"time limit; run the command again to continue; default: {MINUTES:g}",
    )
    group.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[],
        help="row counts (tokens) to measure; default: those of the tuner",
    )
    group.add_argument(
        "--tables", nargs="+", default=[], metavar="LABEL", help="tune only these tables"
    )
    group.add_argument(
        "--list", action="store_true", dest="only_list", help="list the tables without measuring"
    )
    group.add_argument(
        "--gpus", type=int, default=1, help="number of GPUs among which the tables are divided"
    )
    group.add_argument(
        "--ray", action="store_true", help="use the GPUs of a Ray cluster (RAY_ADDRESS)"
    )
    tune_speculative.configure(parser)
    tune_parallel.configure(parser)
    tune_published.configure(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """List the tuners, or run one to measure its tables; return the exit code.

    Returns:
        0, also if the time limit ended the measurements, which is then printed; 2 for an unknown
            tuner or a refused model.
    """
    try:
        tuner = ENGINE_TUNERS.get(args.tuner)
        if tuner is None:
            tune_published.translate(args)
        given = read_command_line(args)
        refusals = [*given.layer.refusals, *([FACTS_REFUSED] if args.facts else [])]
        if refusals:
            raise ConfigError(refusals, given.source)
        if tuner is not None:
            _refuse_options(tuner.NAME, _others_options(args))
        args.max_minutes = MINUTES if args.max_minutes is None else args.max_minutes
        if tuner is not None:
            extra = {"plugins": tuple(args.extra_plugins)} if args.extra_plugins else {}
            return int(tuner.run(args, {**given.config, **extra}))
        tune_published.choose_tuner(args, given.config, given.plugins)
        _refuse_options("a tuner of kernels", _engine_options(args))
        return _tune_kernels(args, given.config, given.plugins)
    except (GlowplugError, OSError, ValueError) as error:
        print(f"glowplug tune: {error}", file=sys.stderr)
        return 2


def _tune_kernels(args: argparse.Namespace, config: Mapping[str, Any], plugins: PluginSet) -> int:
    """List the tuners, or run one of the plugins' tuners of kernels; return the exit code."""
    found = {
        tuner.name: (tuner, plugin)
        for plugin, tuners in plugins.call_each("tuners")
        for tuner in tuners or ()
    }
    if args.tuner is None:
        print("\n".join(f"{name:<12} {one.SUMMARY}" for name, one in ENGINE_TUNERS.items()))
        print("\n".join(f"{tuner.name:<12} {tuner.summary}" for tuner, _ in found.values()))
        return 0
    if args.tuner not in found:
        known = ", ".join(sorted({*found, *ENGINE_TUNERS}))
        raise ValueError(f"no tuner {args.tuner!r}; available: {known}")
    with tempfile.TemporaryDirectory(prefix="glowplug-tune-") as folder:
        return _tune(args, *found[args.tuner], config, plugins, Path(folder))


def _engine_options(args: argparse.Namespace) -> list[str]:
    """Return the options for tuners of engines that are set, each once."""
    given = (tuner.given_options(args) for tuner in ENGINE_TUNERS.values())
    return list(dict.fromkeys(name for names in given for name in names))


def _others_options(args: argparse.Namespace) -> list[str]:
    """Return the options that are set and that the tuner ``args.tuner`` of engines lacks."""
    own = ENGINE_TUNERS[args.tuner].given_options(args)
    others = [name for name in _engine_options(args) if name not in own]
    if args.tuner == tune_parallel.NAME and args.max_minutes is not None:
        others.append("--max-minutes")
    return [*_kernel_options(args), *tune_published.given_options(args), *others]


def _kernel_options(args: argparse.Namespace) -> list[str]:
    """Return the options for tuners of kernels that are set."""
    given = {
        "--rows": args.rows,
        "--tables": args.tables,
        "--list": args.only_list,
        "--gpus": args.gpus > 1,
        "--ray": args.ray,
        "--block-plugin": args.blocked_plugins,
    }
    return [name for name, value in given.items() if value]


def _refuse_options(tuner: str, options: list[str]) -> None:
    """Raise ValueError if ``options`` that ``tuner`` does not have are set."""
    if options:
        raise ValueError(f"{tuner} has no option {options[0]}: leave it out")


def _tune(
    args: argparse.Namespace,
    found: Tuner,
    plugin: str,
    config: Mapping[str, Any],
    plugins: PluginSet,
    folder: Path,
) -> int:
    """Measure the incomplete tables of one tuner, or list them; return the exit code.

    Args:
        args: options of the command.
        found: the tuner's registration.
        plugin: name of the plugin that registered it.
        config: the operator's configuration.
        plugins: the loaded plugins.
        folder: an empty folder for the model cut to one layer of each kind.

    Raises:
        ValueError: the tuner cannot run here, or a table does not exist.
    """
    started = time.monotonic()
    plan = _plan(config, plugins, folder)
    tuner = _factory(found, plugin)(plan)
    every = partial(tuner.tables, layer_shapes(plan, plugins), tuple(args.rows))
    tables = _selected(every(), args.tables)
    if args.only_list or not tables:
        _list(tables, args.tuner)
        return 0
    if not args.ray:
        _check_device(found, plan)
    seconds = started + args.max_minutes * 60 - time.monotonic()
    _show_folders(tables)
    if args.gpus > 1 or args.ray:
        incomplete = [table.label for table in tables if table.missing]
        run_workers(incomplete, args.gpus, seconds, args.ray)
    else:
        _measure(tuner, tables, seconds)
    _show(_selected(every(), [table.label for table in tables]))
    return 0


def _show_folders(tables: list[TuneTable]) -> None:
    """Print the folders of the files that the tables are written to."""
    folders = sorted({str(table.path.parent) for table in tables})
    print(f"measurements are written to {', '.join(folders)}", flush=True)


def _check_device(found: Tuner, plan: EnginePlan) -> None:
    """Raise ValueError if the tuner measures on another kind of device than this machine's."""
    if found.device not in ("", plan.device):
        raise ValueError(
            f"{found.name} measures on {found.device}, and here the device is {plan.device}: "
            "run it where the model will be served, add --ray for the GPUs of a cluster, or --list "
            "to see the tables"
        )


def _factory(found: Tuner, plugin: str) -> Callable[[EnginePlan], TableTuner]:
    """Import and return the tuner's factory.

    Raises:
        PluginLoadError: the factory cannot be imported.
        ValueError: the tuner needs a package that is not installed; the message names the package.
    """
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


def _selected(tables: list[TuneTable], labels: list[str]) -> list[TuneTable]:
    """Return the tables with the given labels; all tables if ``labels`` is empty.

    Raises:
        ValueError: a label that this model does not have.
    """
    known = {table.label for table in tables}
    unknown = [label for label in labels if label not in known]
    if unknown and known:
        raise ValueError(f"no table {unknown[0]!r}; this model has: {', '.join(sorted(known))}")
    return [table for table in tables if not labels or table.label in labels]


def _plan(config: Mapping[str, Any], plugins: PluginSet, folder: Path) -> EnginePlan:
    """Return the plan of the model cut to one layer of each kind; all GEMM shapes stay the same.

    Several ranks (--tp-size) are planned for as many GPUs of this kind; none of them is started.
    """
    write_cut(model_config(str(config.get("model", "embedded")), plugins), folder)
    given = {
        "context_length": 256,
        **config,
        "model": str(folder),
        "skip_tokenizer": True,
        "weights": {"use": "random"},
    }
    return plan_of_ranks(given, plugins, "tune", stores_weights=False)


def _measure(tuner: TableTuner, tables: list[TuneTable], seconds: float) -> None:
    """Tune the incomplete tables, each for an equal share of the remaining time.

    ``seconds``: time limit for all tables.
    """
    deadline = time.monotonic() + seconds
    incomplete = [table for table in tables if table.missing]
    for number, table in enumerate(incomplete):
        share = (deadline - time.monotonic()) / (len(incomplete) - number)
        if share <= 0:
            print(f"out of time before {table.label}", flush=True)
            return
        print(
            f"{table.label}: {len(table.missing)} of {len(table.rows)} to measure, {share:.0f} s",
            flush=True,
        )
        tuner.tune(table, share, lambda line: print(f"  {line}", flush=True))


def _list(tables: list[TuneTable], tuner: str) -> None:
    """Print the tables of a tuner without measuring, or a line that says it has none."""
    if not tables:
        print(f"this model has nothing for {tuner} to tune")
    _show(tables, "run it without --list")


def _show(tables: list[TuneTable], how: str = "run the same command again to continue") -> None:
    """Print how complete each table is.

    ``how``: instruction to continue, printed if a table is incomplete.
    """
    for table in tables:
        left = f", missing {', '.join(map(str, table.missing))}" if table.missing else ""
        print(
            f"{table.label}: {len(table.rows) - len(table.missing)} of {len(table.rows)} "
            f"in {table.path}{left}"
        )
    if any(table.missing for table in tables):
        print(f"not complete: {how}")
