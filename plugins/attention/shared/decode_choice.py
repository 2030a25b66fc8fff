"""Tables of the decode kernel measured fastest on one H200 in bf16.

The tables are indexed by two numbers: the queries that share a row's keys, and the rows of a step.
In latent attention a row has (its tokens) x (heads of a rank) such queries; in multi-head
attention, (its tokens) x (heads that share one key head). The measured microseconds per layer are
in ``docs/benchmarks``. The lengths of the rows are not an index, because a captured graph serves
rows of any length up to the longest one that the plan admits.
"""

from __future__ import annotations

import math

from glowplug.kernels.launch.cuda_arch import (
    FEW_HEADS_MAX,
    SHORT_KEYS_MAX,
    merge_in_values_rows,
)

Line = tuple[tuple[float, str], ...]  #: (most rows of a step, kernel), ascending in rows

#: queries of a row -> kernels by rows. The Triton kernel is faster for few rows, and where its
#: programs exactly fill the 132 multiprocessors one or more times.
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
#: entries that replace or extend FASTEST when no row can be longer than SHORT_KEYS_MAX keys and
#: each row has one token. With 128 queries the Triton kernel was up to 33 us a layer faster at 512
#: keys, and up to 13 us at 4096 keys.
FASTEST_SHORT: dict[int, Line] = {
    128: ((16, "triton"), (math.inf, "flashmla")),
    256: ((math.inf, "flashmla"),),
}

#: queries of a key head -> kernels by rows, for multi-head attention with a head size of 128;
#: measured with 32, 8, 8, 8 and 1 key heads. NOTE: with 64 queries FlashAttention-3 was 10% and 4%
#: faster at 8 and 32 rows; only its time was examined there, so it is not used.
FASTEST_MHA: dict[int, Line] = {
    1: ((math.inf, "triton"),),
    4: ((math.inf, "triton"),),
    8: ((math.inf, "triton"),),
    16: ((math.inf, "triton"),),
    64: ((math.inf, "triton"),),
}


def fastest(queries: int, rows: int, longest: float = math.inf, width: int = 1) -> str:
    """Return the fastest kernel for decode rows, "triton" or "flashmla", as measured.

    The table entry measured for the nearest number of queries is used.

    Args:
        queries: Number of queries of a row (tokens times heads of the rank).
        rows: Number of decode rows of the step.
        longest: Number of keys of the longest row that can occur.
        width: Number of tokens of a row.
    """
    return _kernel_for(nearest_entry(queries, longest, width), rows)


def nearest_entry(queries: int, longest: float, width: int) -> Line:
    """Return the table entry for the number of queries nearest to ``queries``.

    Arguments as in :func:`fastest`.
    """
    return _nearest(
        FASTEST | FASTEST_SHORT if longest <= SHORT_KEYS_MAX and width == 1 else FASTEST, queries
    )


def short_rows(heads: int) -> range:
    """Return the row counts at which the fastest kernel differs for short and for long contexts.

    The contexts of a step are short if no row has more than SHORT_KEYS_MAX keys and each row
    computes one token. ``heads``: number of heads on a rank.
    """
    if heads > FEW_HEADS_MAX:
        most, kernel = nearest_entry(heads, SHORT_KEYS_MAX, 1)[0]
        return range(1, 1 + int(most) if kernel == "triton" else 1)
    return merge_in_values_rows(heads) if heads <= 16 else range(0)


def fastest_mha(queries: int, rows: int) -> str:
    """Return the fastest multi-head kernel for ``rows`` decode rows, as measured.

    ``queries``: number of queries of a row for each key head.
    """
    return _kernel_for(_nearest(FASTEST_MHA, queries), rows)


def _nearest(table: dict[int, Line], queries: int) -> Line:
    return table[min(table, key=lambda measured: abs(math.log2(measured / queries)))]


def _kernel_for(line: Line, rows: int) -> str:
    return next(kernel for most, kernel in line if rows <= most)
