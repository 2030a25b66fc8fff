"""Engine options of the in-process benchmarks: the same flags, config file and ``--set`` as
``glowplug serve``.
"""

from __future__ import annotations

import argparse
from typing import Any

from glowplug.core.errors import ConfigError, Refusal
from glowplug.entrypoints.cli.flags import (
    add_engine_options as add_engine_options,
    read_command_line,
)


def engine_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration as ``LLM(**config)`` takes it. ConfigError for what could not be read."""
    given = read_command_line(args)
    refusals = list(given.layer.refusals)
    if args.facts:
        refusals.append(
            Refusal(
                "bench",
                "--facts",
                "a measurement runs on this machine, not on a fact sheet's",
                "leave --facts out, or use `glowplug check`",
            )
        )
    if args.blocked_plugins:
        refusals.append(
            Refusal(
                "bench",
                "--block-plugin",
                "in-process benchmarks load every plugin",
                "pick another one with --set SECTION.use=NAME",
            )
        )
    if refusals:
        raise ConfigError(refusals, given.source)
    extra = {"plugins": tuple(args.extra_plugins)} if args.extra_plugins else {}
    return {**given.config, **extra}
