"""Engine options of the in-process benchmarks: the same flags, config file and ``--set`` as ``glowplug serve``."""
from __future__ import annotations

import argparse
from typing import Any


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "--model-path", default="embedded")


def engine_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration as ``LLM(**config)`` takes it."""
    return {"model": args.model}
