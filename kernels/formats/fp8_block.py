"""Size of a block of block FP8, for plans and kernels alike; this module imports no torch."""

FP8_BLOCK = 128  #: rows and columns of a weight block; channels of an activation group
