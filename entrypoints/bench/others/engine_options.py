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


def add_batch_options(group: argparse._ArgumentGroup, each: str) -> None:
    """Add the options that describe static batches.

    Args:
        group: the group of options.
        each: what is done for each combination of the options, for the help: "run", "request".
    """
    group.add_argument(
        "--batch-size",
        "--batch",
        type=int,
        nargs="+",
        default=[1],
        help=f"number of sequences; one {each} for each combination of the batch options",
    )
    group.add_argument(
        "--input-len", "--input", type=int, nargs="+", default=[1024], help="prompt tokens"
    )
    group.add_argument(
        "--output-len", "--output", type=int, nargs="+", default=[16], help="tokens to generate"
    )
