"""``glowplug completion SHELL``: a script that completes commands, flags and their values.

The script is made from the commands' own parsers, so it has the flags of the installed plugins.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from glowplug.entrypoints.cli.exit_codes import OK
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.cli.shell_scripts import SCRIPTS


@dataclass
class ShellFlag:
    """A flag of a command.

    Attributes:
        names: spellings, with dashes.
        help: description, one line.
        takes_value: a value follows.
        choices: permitted values; () for any value, which is completed as a file.
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()


@dataclass
class CommandWords:
    """The words that can follow a command.

    Attributes:
        path: words of the command, such as ("bench", "serving"); () for the program itself.
        commands: name and description of each sub-command.
        flags: its flags.
    """

    path: tuple[str, ...]
    commands: dict[str, str] = field(default_factory=dict)
    flags: list[ShellFlag] = field(default_factory=list)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SCRIPTS), help="shell that runs the script")


def run(args: argparse.Namespace) -> int:
    """Print the script and return the exit code."""
    sys.stdout.write(SCRIPTS[args.shell](list(all_commands())))
    return OK


def all_commands() -> Iterator[CommandWords]:
    """Yield the words of the program, of each command and of each sub-command."""
    from glowplug.core.plugin.registry import load_plugins
    from glowplug.entrypoints.cli.main import COMMANDS

    top = CommandWords((), {name: command.help for name, command in COMMANDS.items()})
    parsers = []
    for name, command in COMMANDS.items():
        parser = Parser(prog=f"glowplug {name}")
        importlib.import_module(command.module).configure(parser)
        parsers.append((name, parser))
    added = Parser(prog="glowplug")
    commands = added.add_subparsers(parser_class=Parser)
    load_plugins().call_each("extend_cli", commands=commands)
    helps = {action.dest: action.help or "" for action in commands._choices_actions}
    for name, parser in commands.choices.items():
        top.commands[name] = helps.get(name, "")
        parsers.append((name, parser))
    yield top
    for name, parser in parsers:
        yield from words_of((name,), parser)


def words_of(path: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[CommandWords]:
    """Yield the words of a command, then those of its sub-commands."""
    found = CommandWords(path)
    nested: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {entry.dest: entry.help or "" for entry in action._choices_actions}
            found.commands |= {name: _one_line(helps.get(name, "")) for name in action.choices}
            nested += action.choices.items()
        elif action.option_strings and action.help is not argparse.SUPPRESS:
            found.flags.append(_flag(action))
        elif action.choices:
            found.commands |= {str(choice): "" for choice in action.choices}
    yield found
    for name, command in nested:
        yield from words_of((*path, name), command)


def _flag(action: argparse.Action) -> ShellFlag:
    """Return the flag of an argparse action."""
    return ShellFlag(
        tuple(action.option_strings),
        _one_line(action.help or ""),
        takes_value=action.nargs != 0,
        choices=tuple(str(choice) for choice in action.choices or ()),
    )


def _one_line(text: str) -> str:
    """Return the beginning of a description, on one line and without format codes."""
    line = " ".join(text.replace("%%", "%").split())
    return line if len(line) <= 80 else line[:79] + "…"
