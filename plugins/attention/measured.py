"""Which decoding kernel was measured fastest on one H200 in bf16, by queries that share keys and rows of a step.

A row's queries are its tokens times the heads of a rank, or in multi-head attention the heads that share one of keys.
Microseconds a layer lie in ``docs/benchmarks``; a graph fixes the rows of its steps but not their lengths, so that of
contexts only the longest that the plan admits is known.
"""
from __future__ import annotations

import math

#: queries of a row -> (most rows of a step, kernel), fewest first. The Triton kernel is the faster one for few rows,
#: and where its programs just fill the 132 multiprocessors a whole number of times.
FASTEST: dict[int, tuple[tuple[float, str], ...]] = {
    16: ((66, "triton"), (112, "flashmla"), (132, "triton"), (207, "flashmla"), (264, "triton"),
         (math.inf, "flashmla")),
    32: ((8, "triton"), (224, "flashmla"), (264, "triton"), (math.inf, "flashmla")),
    64: ((2, "triton"), (math.inf, "flashmla")),
    128: ((math.inf, "flashmla"),),
}
#: the same where no row can be longer than SHORT keys, for lines that differ, and for those on either side of them; one
#: token a row. With 128 queries and 512 keys the Triton kernel was up to 33 us a layer quicker, with 4096 up to 13.
FASTEST_SHORT: dict[int, tuple[tuple[float, str], ...]] = {
    64: FASTEST[64],
    128: ((16, "triton"), (math.inf, "flashmla")),
    256: ((math.inf, "flashmla"),),
}
SHORT = 8192  #: keys

#: the same of multi-head attention with heads of 128 numbers: 32, 8, 8, 8 and 1 of keys. NOTE: with 64 queries in 8 and
#: 32 rows FlashAttention-3 was 10% and 4% faster; nothing but its time was looked at there, so it is not taken.
FASTEST_MHA: dict[int, tuple[tuple[float, str], ...]] = {
    1: ((math.inf, "triton"),),
    4: ((math.inf, "triton"),),
    8: ((math.inf, "triton"),),
    16: ((math.inf, "triton"),),
    64: ((math.inf, "triton"),),
}


def fastest(queries: int, rows: int, context: int | None = None) -> str:
    """The kernel for ``rows`` decoding rows of ``queries`` queries each, by the table's line nearest in queries;
    ``context``: keys of the longest row that can come."""
    short = context is not None and context <= SHORT and queries > min(FASTEST_SHORT)
    return _find(FASTEST_SHORT if short else FASTEST, queries, rows)


def fastest_mha(queries: int, rows: int) -> str:
    """As :func:`fastest`; ``queries`` of one key head."""
    return _find(FASTEST_MHA, queries, rows)


def _find(table: dict[int, tuple[tuple[float, str], ...]], queries: int, rows: int) -> str:
    line = min(table, key=lambda measured: abs(math.log2(measured / queries)))
    return next(kernel for most, kernel in table[line] if rows <= most)
