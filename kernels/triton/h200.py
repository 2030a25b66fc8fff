"""The card that launch rules were measured on."""
MULTIPROCESSORS = 132
