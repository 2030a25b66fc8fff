"""Engine options of the in-process benchmarks.

The flags, the config file and ``--set`` are the same as those of ``glowplug serve``.
"""

from __future__ import annotations

import argparse
from typing import Any

from glowplug.core.errors import ConfigError, Refusal
from glowplug.entrypoints.cli.flags.command_line import read_command_line


def engine_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's configuration from the options, as keywords of ``LLM``.

    Raises:
        ConfigError: an option could not be read, or does not apply to a benchmark.
    """
    given = read_command_line(args)
    refusals = list(given.layer.refusals)
    if args.facts:
        refusals.append(
            Refusal(
                "bench",
                "--facts",
                "the engine runs on this machine, not on one described by a fact sheet",
                "remove --facts, or use `glowplug check`",
            )
        )
    if args.blocked_plugins:
        refusals.append(
            Refusal(
                "bench",
                "--block-plugin",
                "engines in this process load every plugin",
                "choose another component with --set SECTION.use=NAME",
            )
        )
    if refusals:
        raise ConfigError(refusals, given.source)
    extra = {"plugins": tuple(args.extra_plugins)} if args.extra_plugins else {}
    return {**given.config, **extra}
