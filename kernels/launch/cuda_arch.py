"""Constants of launch rules measured on an H200."""

MULTIPROCESSORS = 132  #: streaming multiprocessors of an H200
SHORT_CONTEXT = 8192  #: context length of a plan up to which few KV splits suffice
#: longest row in a plan of SHORT_CONTEXT: the tokens of a step and drafts are added
SHORT_KEYS_MAX = SHORT_CONTEXT + 128
#: rows of a step for which W_UV's GEMM also merges the KV splits, with at most 16 heads: measured
#: with 8, 16 and 32 rows; with one row it gained nothing
MERGE_IN_VALUES_ROWS = range(8, 33)
#: heads above which few short rows use narrower tiles than the widest
FEW_HEADS_MAX = 64
