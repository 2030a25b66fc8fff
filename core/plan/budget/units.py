"""Numbers of bytes: units, and how they are shown. Plan zone: no torch."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def human(count: int) -> str:
    """Convert a number of bytes to text, such as "3.2 GiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
