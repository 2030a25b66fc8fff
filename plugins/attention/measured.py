"""Which decoding kernel was measured fastest on one H200 in bf16, by queries that share keys and rows of a step.

A row's queries are its tokens times the heads of a rank. Microseconds a layer lie in ``docs/benchmarks``; a graph fixes
the rows of its steps but not their lengths, so contexts are not told apart.
"""
from __future__ import annotations

import math

#: queries of a row -> (most rows of a step, kernel), fewest first. The Triton kernel is the faster one for few rows,
#: and where its programs just fill the 132 multiprocessors a whole number of times.
FASTEST: dict[int, tuple[tuple[float, str], ...]] = {
    16: ((66, "triton"), (112, "flashmla"), (132, "triton"), (224, "flashmla"), (264, "triton"),
         (math.inf, "flashmla")),
    32: ((8, "triton"), (224, "flashmla"), (264, "triton"), (math.inf, "flashmla")),
    64: ((2, "triton"), (math.inf, "flashmla")),
    128: ((math.inf, "flashmla"),),
}


def fastest(queries: int, rows: int) -> str:
    """The kernel for ``rows`` decoding rows of ``queries`` queries each, by the table's line nearest in queries."""
    line = min(FASTEST, key=lambda measured: abs(math.log2(measured / queries)))
    return next(kernel for most, kernel in FASTEST[line] if rows <= most)
