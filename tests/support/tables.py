"""Tuned tables of a test's own, for kernels that remember the tables they read and the choices they
made.
"""

from __future__ import annotations

import sys

READERS = ("glowplug.kernels", "glowplug.plugins.quantization.shared", "glowplug.plugins.attention")


def forget() -> None:
    """Make kernels and plugins read tables, and choose, again."""
    for name, module in list(sys.modules.items()):
        if name.startswith(READERS):
            for value in list(vars(module).values()):
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()
