"""``glowplug check``: the plan, or every reason why it is refused.

Reads no weights and imports no torch, unless ``--numeric`` compares the engine with its reference.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from glowplug.core.config.schema import masked
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.table import DETAILS, render
from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.cli.flags.arguments import add_engine_options, add_model_word
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from glowplug.entrypoints.front.model_text import eos_ids, open_tokenizer


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_word(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the plan, or the numeric report, as JSON"
    )
    group = parser.add_argument_group("numeric check")
    group.add_argument(
        "--numeric",
        action="store_true",
        help="start the engine and compare it, layer by layer, with a float32 reference on this "
        "machine's CPU; exit status 1 if it differs by more than its number formats explain",
    )
    group.add_argument(
        "--numeric-prompts",
        type=Path,
        metavar="FILE",
        help='texts to compare on, as JSON lines with "prompt"; default: four short texts',
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Plan without starting the engine, print the plan and return the exit code."""
    given = read_command_line(args)
    plan = given.plan()
    check_tokenizer(plan, given.plugins)
    if args.numeric or args.numeric_prompts:
        from glowplug.entrypoints.numeric.command import run_numeric

        return run_numeric(args, given, plan)
    if args.json:
        sys.stdout.write(replace(plan, config=masked(plan.config)).to_json().decode() + "\n")
    else:
        print(render(plan))
    return 0


def add_plan_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option ``--plan`` for the plan's details; ``args.plan`` is None without the option.

    Args:
        parser: parser of the command.
        default: description of the default, for ``--help``.
    """
    parser.add_argument(
        "--plan",
        choices=DETAILS,
        help="how much of the plan to print: memory and all that differs from the defaults "
        f"(brief), everything (full) or nothing (none); default: {default}",
    )


def show_plan(plan: EnginePlan, details: str, file: TextIO) -> None:
    """Print the plan to ``file``; ``details``: one of ``core.plan.table.DETAILS``."""
    if details != "none":
        print(render(plan, brief=details == "brief"), file=file)


def check_tokenizer(plan: EnginePlan, plugins: PluginSet) -> None:
    """Check that a checkpoint's tokenizer can be opened, as serving would.

    A model folder with config.json alone, without weights, needs no tokenizer and passes.

    Raises:
        PlanRefused: the tokenizer is missing or damaged.
    """
    eos_ids(plan, open_tokenizer(plan, plugins) if plan.facts.model.tensors else None)
