"""Which decoding kernel was measured fastest on one H200 in bf16, by queries that share keys and
rows of a step.

A row's queries are its tokens times the heads of a rank, or in multi-head attention the heads that
share one of keys. Microseconds a layer lie in ``docs/benchmarks``; a graph fixes the rows of its
steps but not their lengths, so that of contexts only the longest that the plan admits is known.
"""

from __future__ import annotations

import math

from glowplug.kernels.launch.cuda_arch import APART_ROWS, MANY_HEADS, SHORT

Line = tuple[tuple[float, str], ...]  #: (most rows of a step, kernel), fewest rows first

#: queries of a row -> its line. The Triton kernel is the faster one for few rows, and where its
#: programs just fill the 132 multiprocessors a whole number of times.
FASTEST: dict[int, Line] = {
    16: (
        (66, "triton"),
        (112, "flashmla"),
        (132, "triton"),
        (207, "flashmla"),
        (264, "triton"),
        (math.inf, "flashmla"),
    ),
    32: ((8, "triton"), (224, "flashmla"), (264, "triton"), (math.inf, "flashmla")),
    64: ((2, "triton"), (math.inf, "flashmla")),
    128: ((math.inf, "flashmla"),),
}
#: lines that differ, or are added, where no row can be longer than SHORT keys and each has one
#: token. With 128 queries and 512 keys the Triton kernel was up to 33 us a layer quicker, with 4096
#: up to 13.
FASTEST_SHORT: dict[int, Line] = {
    128: ((16, "triton"), (math.inf, "flashmla")),
    256: ((math.inf, "flashmla"),),
}

#: the same of multi-head attention with heads of 128 numbers: 32, 8, 8, 8 and 1 of keys. NOTE: with
#: 64 queries in 8 and 32 rows FlashAttention-3 was 10% and 4% faster; nothing but its time was
#: looked at there, so it is not taken.
FASTEST_MHA: dict[int, Line] = {
    1: ((math.inf, "triton"),),
    4: ((math.inf, "triton"),),
    8: ((math.inf, "triton"),),
    16: ((math.inf, "triton"),),
    64: ((math.inf, "triton"),),
}


def fastest(queries: int, rows: int, longest: float = math.inf, width: int = 1) -> str:
    """The kernel for ``rows`` decoding rows of ``queries`` queries each, by the table's line
    nearest in queries;
    ``longest``: keys of the longest row that can come, ``width``: tokens a row."""
    return _of(line(queries, longest, width), rows)


def line(queries: int, longest: float, width: int) -> Line:
    """The table's for so many ``queries``, as in :func:`fastest`."""
    return _nearest(
        FASTEST | FASTEST_SHORT if longest <= SHORT and width == 1 else FASTEST, queries
    )


def short_rows(heads: int) -> range:
    """How many rows of one token are decoded otherwise, and quicker, where none is longer than
    SHORT.
    """
    if heads > MANY_HEADS:
        most, kernel = line(heads, SHORT, 1)[0]
        return range(1, 1 + int(most) if kernel == "triton" else 1)
    return APART_ROWS if heads <= 16 else range(0)


def fastest_mha(queries: int, rows: int) -> str:
    """As :func:`fastest`; ``queries`` of one key head."""
    return _of(_nearest(FASTEST_MHA, queries), rows)


def _nearest(table: dict[int, Line], queries: int) -> Line:
    return table[min(table, key=lambda measured: abs(math.log2(measured / queries)))]


def _of(line: Line, rows: int) -> str:
    return next(kernel for most, kernel in line if rows <= most)
