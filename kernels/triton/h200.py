"""The card that launch rules were measured on."""
MULTIPROCESSORS = 132
#: keys that a row may come to, up to which few parts of it are enough; a step and drafts go beyond the 8192 of a plan
SHORT = 8192 + 128
