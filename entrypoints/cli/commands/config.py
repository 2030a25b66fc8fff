"""``glowplug config show``: the configuration, with the source of each value."""

from __future__ import annotations

import argparse
import json
import sys

from glowplug.core.config.schema import SECRETS
from glowplug.core.plan.resolved import ResolvedOption, given_options, resolved_options
from glowplug.entrypoints.cli.exit_codes import OK
from glowplug.entrypoints.cli.flags.arguments import add_engine_options, add_model_word
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from glowplug.entrypoints.cli.toml_text import to_toml
from glowplug.entrypoints.cli.usage import command_list

SHOW = "print the configuration, with the source of each value"


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="config_command", metavar="COMMAND")
    show = commands.add_parser("show", help=SHOW, description=SHOW)
    show.add_argument(
        "--resolved",
        action="store_true",
        help="plan, and print every option with the value that the plan decided; the output, read "
        "with --config, gives the same plan",
    )
    show.add_argument(
        "--format",
        choices=("toml", "json"),
        default="toml",
        help="toml has the sources as comments, json has only the values (default toml)",
    )
    add_model_word(show)
    add_engine_options(show)


def run(args: argparse.Namespace) -> int:
    """Print the configuration and return the exit code."""
    if args.config_command is None:
        print(command_list("glowplug config", {"show": SHOW}))
        return OK
    given = read_command_line(args)
    plan = given.plan()
    options = resolved_options(plan, given.plugins) if args.resolved else given_options(plan)
    if args.format == "json":
        print(json.dumps(nested(options), indent=2))
    else:
        sys.stdout.write(to_toml([option for option in options if option.path not in SECRETS]))
        for option in options:
            if option.path in SECRETS and option.value is not None:
                print(f"# {option.path} is a secret and not shown ({option.source})")
    return OK


def nested(options: list[ResolvedOption]) -> dict[str, object]:
    """Return the values as a nested configuration, without secrets and without values of None."""
    from glowplug.core.config.files import set_path

    found: dict[str, object] = {}
    for option in options:
        if option.path not in SECRETS and option.value is not None:
            set_path(found, option.path, option.value)
    return found
