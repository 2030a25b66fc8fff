"""Commands with a line each, for those who name none."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from glowplug.entrypoints.cli.exit_codes import REFUSED


def usage(program: str, commands: Mapping[str, str]) -> str:
    """``commands``: summary by name."""
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
    """Says on standard error that a sub-command is missing, and which there are. The exit status."""
    print(f"{program}: which COMMAND?\n\n{usage(program, commands)}", file=sys.stderr)
    return REFUSED
