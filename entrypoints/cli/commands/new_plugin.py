"""``glowplug new-plugin``: write a plugin distribution whose tests pass. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from glowplug.core.plugin.slots import SLOTS
from glowplug.entrypoints.cli.exit_codes import OK, REFUSED
from glowplug.entrypoints.cli.plugin_template import (
    NewPluginError,
    built_in,
    check_name,
    files_of,
    find_slot,
    write,
)


def configure(parser: argparse.ArgumentParser) -> None:
    slots = ", ".join(slot.name for slot in SLOTS)
    parser.add_argument("slot", metavar="SLOT", help=f"slot of the component: {slots}")
    parser.add_argument("name", metavar="NAME", help="name of the component, as in shortest_first")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="new folder; default: ./glowplug-NAME"
    )


def run(args: argparse.Namespace) -> int:
    """Write the distribution, print its folder and the next steps, and return the exit code."""
    try:
        slot = find_slot(args.slot)
        check_name(args.name, slot, built_in())
        folder = args.output or Path(f"glowplug-{args.name.replace('_', '-')}")
        files = files_of(slot, args.name)
        write(folder, files)
    except NewPluginError as error:
        print(f"glowplug new-plugin: {error}", file=sys.stderr)
        return REFUSED
    for path in files:
        print(folder / path)
    print(f"\ncd {folder} && pip install -e '.[test]' && python -m pytest")
    return OK
