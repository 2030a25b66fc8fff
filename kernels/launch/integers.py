"""Integer arithmetic for launch parameters.

NOTE: triton provides both functions, for the host and for kernels alike, but inspects every
argument for that: 2 to 5 us per call, and one layer of a prefill step makes dozens of calls. Inside
kernels there is ``tl.cdiv``.
"""

from __future__ import annotations


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """Return the smallest power of two that is not below ``x``; 1 for ``x`` below 1."""
    return 1 << (x - 1).bit_length() if x > 1 else 1
