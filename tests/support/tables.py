"""Tuned tables of a test's own, where kernels remember what they read once and chose by it."""

from __future__ import annotations

import sys

KERNELS = "glowplug.kernels"


def forget() -> None:
    """Tables are read again, and chosen by again."""
    for name, module in list(sys.modules.items()):
        if name.startswith(KERNELS):
            for value in list(vars(module).values()):
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()
