"""The card that launch rules were measured on."""
MULTIPROCESSORS = 132
SHORT_CONTEXT = 8192  #: of a plan whose rows are short: few parts of their keys are enough,
SHORT = SHORT_CONTEXT + 128  #: and positions that such rows may come to in a step and with drafts
