"""``glowplug check``: the plan, or every reason why there is none. Reads headers only; imports no torch."""
from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from glowplug.core.config import masked
from glowplug.core.plan_table import render
from glowplug.entrypoints.flags import add_engine_options, read_command_line


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    plan = read_command_line(args).plan()
    if args.json:
        sys.stdout.write(replace(plan, config=masked(plan.config)).to_json().decode() + "\n")
    else:
        print(render(plan))
    return 0
