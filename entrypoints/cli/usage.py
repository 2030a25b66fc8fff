"""The list of commands that is printed when the command line names none."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from glowplug.entrypoints.cli.exit_codes import REFUSED


def command_list(program: str, commands: Mapping[str, str]) -> str:
    """Return a usage text that lists ``commands``, a mapping from name to summary."""
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in commands.items()]
    return "\n".join(
        [
            f"usage: {program} COMMAND [options]",
            "",
            *lines,
            "",
            f"{program} COMMAND --help shows a command's options.",
        ]
    )


def without_command(program: str, commands: Mapping[str, str]) -> int:
    """Print to stderr that a sub-command is missing, and list them all; return the exit code."""
    print(f"{program}: no COMMAND given\n\n{command_list(program, commands)}", file=sys.stderr)
    return REFUSED
