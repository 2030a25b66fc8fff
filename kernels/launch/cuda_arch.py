"""The card that launch rules were measured on."""

MULTIPROCESSORS = 132
SHORT_CONTEXT = 8192  #: of a plan whose rows are short: few parts of their keys are enough,
SHORT = SHORT_CONTEXT + 128  #: and positions that such rows may come to in a step and with drafts
#: rows of 16 heads at most in steps whose parts of keys W_UV's product joins: measured with 8, 16
#: and 32, with one it gained nothing
APART_ROWS = range(8, 33)
MANY_HEADS = 64  #: heads beyond which few short rows are cut narrower than the widest tile
