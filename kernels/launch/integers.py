"""Whole numbers that launches are made of.

NOTE: triton has both, for the host and for kernels alike, and takes every argument apart for that:
2 to 5 us a call, of which a layer of a prompt's pass makes dozens. Inside kernels there is
``tl.cdiv``.
"""

from __future__ import annotations


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is not below ``x``; 1 for what is below 1."""
    return 1 << (x - 1).bit_length() if x > 1 else 1
