"""The ``glowplug`` command.

Only the module of the given sub-command is imported. Planning needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glowplug.core.errors import GlowplugError, PlanRefused, PluginLoadError
from glowplug.entrypoints.cli.exit_codes import FAILED, OK, REFUSED, exit_at_sigterm
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.cli.usage import command_list


@dataclass(frozen=True)
class Command:
    """A sub-command of ``glowplug``.

    Attributes:
        module: dotted name of a module with ``configure(parser)`` and ``run(args) -> exit code``.
        help: one line for the list of commands.
        starts_programs: True: the command starts other programs, and ends them when it is
            terminated.
    """

    module: str
    help: str
    starts_programs: bool = False


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "glowplug.entrypoints.cli.commands.serve", "serve a model over HTTP (OpenAI API)"
    ),
    "chat": Command(
        "glowplug.entrypoints.chat",
        "chat in the terminal with a running server, or with an engine in this process",
    ),
    "download": Command(
        "glowplug.entrypoints.cli.commands.download", "download a model from a hub to its cache"
    ),
    "demo": Command(
        "glowplug.entrypoints.cli.demo", "print the plan, then stream answers of the embedded model"
    ),
    "run-batch": Command(
        "glowplug.entrypoints.batch.command",
        "answer the requests of a file in OpenAI's batch format, without a server",
    ),
    "check": Command(
        "glowplug.entrypoints.cli.commands.check",
        "plan only: print the plan, or every reason why it is refused",
    ),
    "facts": Command(
        "glowplug.entrypoints.cli.commands.facts",
        "print this machine's fact sheet, for planning on another machine",
    ),
    "plugins": Command(
        "glowplug.entrypoints.cli.commands.plugins", "list plugins and what they register"
    ),
    "new-plugin": Command(
        "glowplug.entrypoints.cli.commands.new_plugin",
        "write a plugin distribution for a slot, with tests that pass",
    ),
    "schema": Command(
        "glowplug.entrypoints.cli.commands.schema",
        "print the JSON Schema of the configuration, for editors",
    ),
    "bench": Command(
        "glowplug.entrypoints.bench",
        "run benchmarks: one-batch, serving, ...",
        starts_programs=True,
    ),
    "ablate": Command(
        "glowplug.entrypoints.bench.ablation.command",
        "measure techniques on and off, a fresh engine for each row of a table",
        starts_programs=True,
    ),
    "eval": Command(
        "glowplug.entrypoints.evaluation",
        "measure accuracy: gsm8k, mmlu, ...",
        starts_programs=True,
    ),
    "tune": Command(
        "glowplug.entrypoints.cli.commands.tune",
        "measure kernels for a model on this GPU and keep the fastest",
    ),
    "export-nextn": Command(
        "glowplug.entrypoints.cli.commands.export_nextn",
        "write a checkpoint's next-token layer to a folder of its own, for drafting",
    ),
    "checkpoint": Command(
        "glowplug.entrypoints.checkpoints.random", "write checkpoints of random weights"
    ),
    "collect-env": Command(
        "glowplug.entrypoints.cli.commands.collect_env",
        "print versions, devices, folders and variables, for a bug report",
    ),
    "config": Command(
        "glowplug.entrypoints.cli.commands.config",
        "print the configuration, with the source of each value",
    ),
    "completion": Command(
        "glowplug.entrypoints.cli.commands.completion",
        "print a script that completes commands and flags in a shell",
    ),
    "version": Command("glowplug.entrypoints.cli.commands.version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the command line without the program's name; None: that of this process.

    Returns:
        0 for success, 1 for a failure, 2 for a refused configuration, plugin or flag; 130 after an
        interrupt.
    """
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
    """Return the usage text with the list of commands."""
    return command_list("glowplug", {name: command.help for name, command in COMMANDS.items()})


def _run(name: str, words: Sequence[str]) -> int:
    """Run the sub-command ``name`` and return its exit code."""
    command = COMMANDS.get(name)
    if command is None:
        return _plugin_command(name, words)
    module: Any = importlib.import_module(command.module)
    parser = Parser(prog=f"glowplug {name}", description=command.help)
    module.configure(parser)
    args = parser.parse_args(list(words))
    if not command.starts_programs:
        return int(module.run(args))
    with exit_at_sigterm():
        return int(module.run(args))


def _plugin_command(name: str, words: Sequence[str]) -> int:
    """Run a command that a plugin added by its hook ``extend_cli``, and return its exit code.

    The plugin's parser sets ``run`` to a function of the parsed options.
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
