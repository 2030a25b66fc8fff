"""``glowplug facts``: the fact sheet of this machine, for planning on another machine.

Imports no torch.
"""

from __future__ import annotations

import argparse

import msgspec

from glowplug.core.facts.machine import own_sheet
from glowplug.core.plugin.registry import load_plugins


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="load an additional plugin module; the packages it requires are listed too",
    )


def run(args: argparse.Namespace) -> int:
    """Print this machine's fact sheet as JSON and return the exit code."""
    sheet = own_sheet(load_plugins(extra=args.plugin).packages)
    print(msgspec.json.format(msgspec.json.encode(sheet), indent=1).decode())
    return 0
