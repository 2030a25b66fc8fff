"""``glowplug run-batch``: the requests of a file, without a server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from glowplug.core.config.operation_options import LogOptions
from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.plugin.options import ServerOptions
from glowplug.entrypoints.cli.commands.check import add_plan_option, show_plan
from glowplug.entrypoints.cli.exit_codes import OK, PARTLY, REFUSED, SECOND_SIGNAL
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import read_command_line

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan
    from glowplug.core.plugin.registry import PluginSet
    from glowplug.core.protocols import Executor
    from glowplug.entrypoints.batch.run import Totals

PROGRAM = "glowplug run-batch"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests as JSON lines: custom_id, method, url, body",
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="file for the answers"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the answers in the output file and run the other requests",
    )
    parser.add_argument(
        "--max-in-flight",
        type=int,
        metavar="N",
        help="most requests at a time (default: twice the sequences that run at once)",
    )
    add_plan_option(parser, "brief")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the requests of the input file and return the exit code.

    Returns:
        0 if every request was answered; 1 if the run failed; 2 for refused options or files; 3 if
        some requests were refused or failed; 130 after a signal.
    """
    given = read_command_line(args)
    plan = given.plan()
    refusals = _refusals(args)
    if refusals:
        raise PlanRefused(refusals, given.source)
    show_plan(plan, args.plan or "brief", sys.stderr)
    plan = _without_request_lines(plan)
    from glowplug.entrypoints.front.follow import follow
    from glowplug.entrypoints.front.open_engine import make_executor
    from glowplug.entrypoints.server.logs import set_up_logging

    set_up_logging(LogOptions.model_validate(plan.config.get("log", {})))
    executor = make_executor(plan, given.plugins)
    if not executor.leads:
        return follow(plan, given.plugins, executor)
    try:
        totals = _run(args, plan, given.plugins, executor)
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return REFUSED
    return _report(totals, args.output_file)


def _without_request_lines(plan: EnginePlan) -> EnginePlan:
    """Return the plan with ``log.requests`` off unless the operator has set it.

    The output file has a line for each request.
    """
    log = {"requests": False, **plan.config.get("log", {})}
    return replace(plan, config={**plan.config, "log": log})


def _refusals(args: argparse.Namespace) -> list[Refusal]:
    """Return the reasons why the options cannot be used."""
    found = []
    for flag, name in (("--input-file", args.input_file), ("--output-file", args.output_file)):
        if "://" in name:
            found.append(
                Refusal(
                    "run-batch",
                    flag,
                    f"{name} is an address, and the engine makes no outbound connections",
                    "copy the file to this machine and give its path",
                )
            )
    if not found and not Path(args.input_file).is_file():
        found.append(
            Refusal("run-batch", "--input-file", f"{args.input_file} is no file", "give its path")
        )
    if args.max_in_flight is not None and args.max_in_flight < 1:
        found.append(
            Refusal("run-batch", "--max-in-flight", "at least one request runs", "give 1 or more")
        )
    if args.facts:
        found.append(
            Refusal(
                "run-batch",
                "--facts",
                "a plan for another machine cannot run here",
                "leave --facts out; glowplug check --facts prints the plan",
            )
        )
    return found


def _run(
    args: argparse.Namespace, plan: EnginePlan, plugins: PluginSet, executor: Executor
) -> Totals:
    """Start the engine, run the batch and return its counts.

    Raises:
        ValueError: the output file cannot be used.
        OSError: a file cannot be read or written.
    """
    from glowplug.entrypoints.batch.files import OutputFile, read_input
    from glowplug.entrypoints.batch.local_app import local_app
    from glowplug.entrypoints.batch.run import BatchRun
    from glowplug.entrypoints.bench.load.load import progress
    from glowplug.entrypoints.front import event_loop
    from glowplug.entrypoints.server.logs import stats_lines

    log = LogOptions.model_validate(plan.config.get("log", {}))
    limit = ServerOptions.model_validate(plan.config.get("server", {})).drain_timeout
    sizes = plan.sizes
    most = args.max_in_flight or min(2 * sizes.groups * sizes.max_running, sizes.max_admitted)
    advance, close = progress(_count_lines(Path(args.input_file)), True)

    async def whole() -> Totals:
        async with local_app(plan, plugins, executor) as app:
            stats = asyncio.create_task(stats_lines(app.context.client, log))
            try:
                batch = BatchRun(app, read_input(Path(args.input_file)), output, advance)
                return await batch.run(min(most, sizes.max_admitted), limit)
            finally:
                stats.cancel()

    with OutputFile(Path(args.output_file), args.resume) as output:
        try:
            return event_loop.run(whole())
        finally:
            close()


def _count_lines(path: Path) -> int:
    """Return the number of lines of a file that are not blank."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _report(totals: Totals, output: str) -> int:
    """Print the counts of a run and return its exit code."""
    logging.shutdown()
    earlier = f", {totals.skipped} answered earlier" if totals.skipped else ""
    print(
        f"{PROGRAM}: {totals.answered} answered, {totals.failed} failed{earlier}: {output}",
        file=sys.stderr,
    )
    if totals.interrupted:
        print(f"{PROGRAM}: interrupted; --resume runs the other requests", file=sys.stderr)
        return SECOND_SIGNAL
    return PARTLY if totals.failed else OK
