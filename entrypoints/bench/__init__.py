"""``glowplug bench``: measurements of an engine in this process or of a running server.

Each module in this folder is one sub-command and exposes ``configure(parser)`` and ``run(args) ->
int``. The servers may be glowplug's or another engine's.
"""

from __future__ import annotations

import argparse
import importlib

from glowplug.entrypoints.cli.usage import without_command

COMMANDS = {
    "one-batch": ("one_batch", "prefill and decode latency of one static batch, in this process"),
    "one-batch-server": (
        "load.one_batch_server",
        "latency of one static batch over HTTP, of a running server or of one that it starts",
    ),
    "kernels": (
        "kernels",
        "each kernel of a step timed by itself, with all its providers side by side",
    ),
    "offline": ("offline", "throughput of the offline engine, in this process"),
    "serving": (
        "serving",
        "latency and throughput of a server under load: glowplug, vLLM, SGLang, any OpenAI server",
    ),
    "sweep": (
        "sweep",
        "serving at several concurrencies under two or more settings, with the change in percent",
    ),
    "speculative": (
        "speculative",
        "speed and accept length for each size of the drafts, in this process",
    ),
    "soak": (
        "soak",
        "hours of mixed requests, in this process: no errors, no memory growth, no leaked pages",
    ),
    "table": ("table", "a table of results that `serving` or `one-batch` wrote"),
    "plot": ("plot", "charts of results as SVG: speed, latency, floors, kernels, starts, memory"),
    "peers": ("peers", "our results beside those of other engines, with ratios and the floor"),
    "versus": (
        "versus",
        "measure this engine, SGLang and vLLM on one checkpoint in one run, beside the floor",
    ),
    "single-query": (
        "single_query",
        "one query with every combination of radix cache, NextN, EP-MoE and DP attention",
    ),
    "compare-transformers": (
        "compare",
        "this engine and transformers' generate, compared in one run",
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands to ``parser``.

    Cheap: no sub-command's module imports torch before the sub-command runs.
    """
    commands = parser.add_subparsers(dest="bench_command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        importlib.import_module(f"{__name__}.{module}").configure(command)


def run(args: argparse.Namespace) -> int:
    """Run the chosen sub-command, or list the sub-commands if none was given.

    Returns:
        The exit status.
    """
    if args.bench_command is None:
        return without_command(
            "glowplug bench", {name: summary for name, (_, summary) in COMMANDS.items()}
        )
    module, _ = COMMANDS[args.bench_command]
    status: int = importlib.import_module(f"{__name__}.{module}").run(args)
    return status
