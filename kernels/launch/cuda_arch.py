"""Constants of launch rules measured on an H200."""

MULTIPROCESSORS = 132  #: streaming multiprocessors of an H200
SHORT_CONTEXT = 8192  #: context length of a plan up to which few KV splits suffice
#: longest row, in keys, in a plan of SHORT_CONTEXT: a step's own tokens and drafts are added
SHORT_KEYS_MAX = SHORT_CONTEXT + 128
#: row counts of decode steps in which W_UV's GEMM also merges the KV splits, with at most 16 heads.
#: Measured with 8, 16 and 32 rows; with one row the fusion gained nothing
MERGE_IN_VALUES_ROWS = range(8, 33)
#: most query heads that count as few; with more, few short rows use narrower tiles of heads
FEW_HEADS_MAX = 64
