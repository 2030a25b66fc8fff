"""The ``glowplug`` command. Only the named sub-command's module is imported, and planning needs no
torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glowplug.core.errors import GlowplugError, PlanRefused, PluginLoadError
from glowplug.entrypoints.cli import usage as command_list
from glowplug.entrypoints.cli.exit_codes import FAILED, OK, REFUSED
from glowplug.entrypoints.cli.flags import Parser


@dataclass(frozen=True)
class Command:
    """A sub-command: ``module`` has ``configure(parser)`` and ``run(args) -> exit code``."""

    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "glowplug.entrypoints.cli.commands.serve", "serve a model over HTTP (OpenAI API)"
    ),
    "demo": Command(
        "glowplug.entrypoints.cli.demo", "plan, then a streamed answer of the embedded model"
    ),
    "check": Command(
        "glowplug.entrypoints.cli.commands.check",
        "plan only: print the table, or every reason against it",
    ),
    "facts": Command(
        "glowplug.entrypoints.cli.commands.facts",
        "this machine's fact sheet, to plan for it elsewhere",
    ),
    "plugins": Command(
        "glowplug.entrypoints.cli.commands.plugins", "list plugins and what they register"
    ),
    "schema": Command(
        "glowplug.entrypoints.cli.commands.schema", "JSON Schema of the configuration, for editors"
    ),
    "bench": Command("glowplug.entrypoints.bench", "benchmarks: one-batch, serving, ..."),
    "tune": Command(
        "glowplug.entrypoints.cli.commands.tune",
        "measure kernels for a model on this card, keep the fastest",
    ),
    "export-nextn": Command(
        "glowplug.entrypoints.cli.commands.export_nextn",
        "write a checkpoint's next-token layer as a draft folder",
    ),
    "checkpoint": Command(
        "glowplug.entrypoints.checkpoints.random", "make and inspect checkpoints"
    ),
    "version": Command("glowplug.entrypoints.cli.commands.version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed, 2 refused (configuration, plugins, flags)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] == "--version":
        words[0] = "version"
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return OK if words else REFUSED
    try:
        return _run(words[0], words[1:])
    except PlanRefused as error:
        print(error, file=sys.stderr)
        return REFUSED
    except PluginLoadError as error:
        print(f"PluginLoadError: {error}", file=sys.stderr)
        return REFUSED
    except GlowplugError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return OK


def usage() -> str:
    return command_list.usage(
        "glowplug", {name: command.help for name, command in COMMANDS.items()}
    )


def _run(name: str, words: Sequence[str]) -> int:
    command = COMMANDS.get(name)
    if command is None:
        return _plugin_command(name, words)
    module: Any = importlib.import_module(command.module)
    parser = Parser(prog=f"glowplug {name}", description=command.help)
    module.configure(parser)
    code: int = module.run(parser.parse_args(list(words)))
    return code


def _plugin_command(name: str, words: Sequence[str]) -> int:
    """A command that a plugin adds by ``extend_cli``: its parser sets ``run`` to a function of the
    parsed options.
    """
    import difflib

    from glowplug.core.plugin.registry import load_plugins

    parser = Parser(prog="glowplug")
    commands = parser.add_subparsers(dest="command", parser_class=Parser)
    load_plugins().call_each("extend_cli", commands=commands)
    if name not in commands.choices:
        close = difflib.get_close_matches(name, [*COMMANDS, *commands.choices], 1, 0.6)
        hint = f", did you mean {close[0]!r}?" if close else ""
        print(f"glowplug: unknown command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return REFUSED
    args = parser.parse_args([name, *words])
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)
