"""``glowplug schema``: JSON Schema of the configuration, with the options of all loaded plugins."""

from __future__ import annotations

import argparse
import json

from glowplug.core.config.schema import config_class
from glowplug.core.plugin.registry import load_plugins


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="load an additional plugin module",
    )


def run(args: argparse.Namespace) -> int:
    """Print the JSON schema of the configuration and return the exit code."""
    schema = config_class(load_plugins(extra=args.plugin)).model_json_schema()
    print(
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2)
    )
    return 0
