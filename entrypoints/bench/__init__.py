"""``glowplug bench``: measurements of an engine in this process or of a server, ours or another.

Each module here is one sub-command and exposes ``configure(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import argparse
import importlib

from glowplug.entrypoints.cli.usage import without_command

COMMANDS = {
    "one-batch": ("one_batch", "prefill and decode latency of one static batch, in this process"),
    "kernels": ("kernels", "each kernel of a step by itself, every provider side by side"),
    "offline": ("offline", "throughput of the offline engine, in this process"),
    "serving": (
        "serving",
        "latency and throughput of a server under load: glowplug, vLLM, SGLang, any OpenAI server",
    ),
    "soak": (
        "soak",
        "mixed requests for a long time, in this process: no error, no growth, every page back",
    ),
    "table": ("table", "a result table from the lines that `serving` wrote"),
    "peers": ("peers", "our results beside other engines', with ratios and the floor"),
    "versus": (
        "versus",
        "this engine, SGLang and vLLM measured on one checkpoint in one go, beside the floor",
    ),
    "single-query": (
        "single_query",
        "one query under every mixture of radix cache, NextN, EP-MoE and DP attention",
    ),
    "compare-transformers": ("compare", "this engine against transformers' generate, in one run"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands. Light: no sub-command's module imports torch before it runs."""
    commands = parser.add_subparsers(dest="bench_command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        importlib.import_module(f"{__name__}.{module}").configure(command)


def run(args: argparse.Namespace) -> int:
    """Run the chosen sub-command; its exit status. Without one, they are listed."""
    if args.bench_command is None:
        return without_command(
            "glowplug bench", {name: summary for name, (_, summary) in COMMANDS.items()}
        )
    module, _ = COMMANDS[args.bench_command]
    status: int = importlib.import_module(f"{__name__}.{module}").run(args)
    return status
