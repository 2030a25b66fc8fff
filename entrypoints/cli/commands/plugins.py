"""``glowplug plugins``: every plugin with its distribution, version and components."""

from __future__ import annotations

import argparse
import json
from typing import Any

from glowplug.core.errors import GlowplugError
from glowplug.core.facts.machine import this_machine
from glowplug.core.plan.candidates import unavailable
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.plugin.slots import SLOTS
from glowplug.entrypoints.cli.available_plugins import print_available, print_table
from glowplug.entrypoints.cli.suite_results import SUITE_SECONDS


def positive_seconds(text: str) -> float:
    """Return a number of seconds above 0, from the command line.

    Raises:
        argparse.ArgumentTypeError: the text is no such number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--available",
        action="store_true",
        help="list the installed entry points, also those that cannot be loaded, with the reason",
    )
    parser.add_argument(
        "--suites",
        action="store_true",
        help="with --available: run the conformance suite of each component's slot",
    )
    parser.add_argument(
        "--suite-timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help=f"with --suites: time limit of each component ({SUITE_SECONDS:g})",
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="load an additional plugin module",
    )
    parser.add_argument(
        "--block-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="do not load this plugin",
    )


def run(args: argparse.Namespace) -> int:
    """Load the plugins, print a table or JSON of them and return the exit code."""
    if args.suites and not args.available:
        raise GlowplugError("--suites needs --available")
    if args.suite_timeout is not None and not args.suites:
        raise GlowplugError("--suite-timeout needs --suites")
    if args.available:
        seconds = (args.suite_timeout or SUITE_SECONDS) if args.suites else None
        print_available(args.plugin, args.block_plugin, args.json, seconds)
        return 0
    plugins = load_plugins(extra=args.plugin, block=args.block_plugin)
    found = listing(plugins)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    for name in plugins.blocked:
        print(f"blocked: {name}")
    return 0


def listing(plugins: PluginSet) -> list[dict[str, Any]]:
    """Return one entry per plugin, for a table or JSON.

    An entry has the plugin's name, distribution, version, hooks and components; each component has
    its slot, its contract (version of the protocols it was written for) and its availability.
    """
    packages = plugins.software.packages
    machine = this_machine()
    found: dict[str, dict[str, Any]] = {}
    for source in plugins.sources:
        found[source.name] = {
            "name": source.name,
            "distribution": source.distribution,
            "version": source.version,
            "hooks": plugins.hooks_of(source.name),
            "components": [],
        }
    for slot in SLOTS:
        for registration in plugins.components(slot.name):
            component = registration.component
            found[plugins.source_of(slot.name, component.name).name]["components"].append(
                {
                    "slot": slot.name,
                    "name": component.name,
                    "contract": component.contract,
                    "available": not (why := unavailable(component, slot.name, packages, machine)),
                    "why_not": why,
                    "summary": component.summary,
                }
            )
    return list(found.values())


def show(found: list[dict[str, Any]]) -> None:
    """Print the entries of ``listing`` as a table."""
    lines = [("slot", "name", "plugin", "distribution", "contract", "available")]
    for plugin in found:
        origin = f"{plugin['distribution']} {plugin['version']}".rstrip()
        for component in plugin["components"]:
            lines.append(
                (
                    component["slot"],
                    component["name"],
                    plugin["name"],
                    origin,
                    str(component["contract"]),
                    component["why_not"] or "yes",
                )
            )
        if not plugin["components"]:
            lines.append(("(hooks)", ", ".join(plugin["hooks"]), plugin["name"], origin, "", "yes"))
    print_table(lines)
