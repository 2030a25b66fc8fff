"""``glowplug version``."""

from __future__ import annotations

import argparse
import platform

from glowplug import __version__


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run(args: argparse.Namespace) -> int:
    """Print the versions of glowplug and Python."""
    print(f"glowplug {__version__} (Python {platform.python_version()})")
    return 0
