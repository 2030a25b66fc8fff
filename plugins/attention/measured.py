"""Which decoding kernel was measured fastest, by query heads and tokens of a step, on one H200 in bf16.

Microseconds a layer at contexts 1024 and 4096 lie under ``docs/benchmarks``; a captured step's size is all that a graph
fixes, so contexts are not told apart.
"""
from __future__ import annotations

import math

#: query heads of a rank -> (most tokens of a step, kernel), fewest first; the last one holds for any number
FASTEST: dict[int, tuple[tuple[float, str], ...]] = {
    16: ((16, "triton"), (64, "flashmla"), (math.inf, "triton")),
    128: ((math.inf, "flashmla"),),
}


def fastest(heads: int, tokens: int) -> str:
    """The kernel for ``tokens`` decoding tokens of ``heads`` heads: by the row of the table nearest in heads."""
    row = min(FASTEST, key=lambda measured: abs(math.log2(measured / heads)))
    return next(kernel for most, kernel in FASTEST[row] if tokens <= most)
