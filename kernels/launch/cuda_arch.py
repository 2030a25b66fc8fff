"""Constants of launch rules measured on an H200."""

MULTIPROCESSORS = 132  #: streaming multiprocessors of an H200
SHORT_CONTEXT = 8192  #: context length of a plan up to which few KV splits suffice
#: longest row, in keys, in a plan of SHORT_CONTEXT: a step's own tokens and drafts are added
SHORT_KEYS_MAX = SHORT_CONTEXT + 128
#: most query heads that count as few; with more, few short rows use narrower tiles of heads
FEW_HEADS_MAX = 64
HALF_BLOCK_HEADS_MAX = 8  #: most query heads that fill half of the decode kernel's smallest block


def merge_in_values_rows(heads: int) -> range:
    """Return the row counts of decode steps in which W_UV's GEMM also merges the KV splits.

    Measured with 16 heads and 8, 16 and 32 rows; with one row the fusion gained nothing. With 8
    heads it gains with 1 and 4 rows, too: the decode kernel and the GEMM take 9.9 and 9.7 us for
    rows of 1024 keys; with a merge kernel between them they take 11.5 us for one row.

    Args:
        heads: query heads, at most 16.
    """
    return range(1 if heads <= HALF_BLOCK_HEADS_MAX else 8, 33)
