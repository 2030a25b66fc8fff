"""``glowplug serve``: plan, print the plan, start the engine and the HTTP server."""

from __future__ import annotations

import argparse
import sys

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.entrypoints.cli.commands.check import add_plan_option, check_tokenizer, show_plan
from glowplug.entrypoints.cli.flags.arguments import add_engine_options, add_model_word
from glowplug.entrypoints.cli.flags.command_line import read_command_line


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_word(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    add_plan_option(parser, "brief; full with --dry-run")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, and serve the model over HTTP until it is stopped; return the exit code."""
    given = read_command_line(args)
    plan = given.plan()
    if args.dry_run:
        check_tokenizer(plan, given.plugins)
    show_plan(
        plan,
        args.plan or ("full" if args.dry_run else "brief"),
        sys.stdout if args.dry_run else sys.stderr,
    )
    if args.dry_run:
        return 0
    if args.facts:
        raise PlanRefused(
            [
                Refusal(
                    "serve",
                    "--facts",
                    f"the plan is for {plan.facts.hardware.name}, not for this machine",
                    "add --dry-run, or leave --facts out",
                )
            ],
            given.source,
        )
    from glowplug.entrypoints.server.serve import main

    return main(plan, given.plugins)
