"""Constants of block FP8, for plans and kernels alike; this module imports no torch."""

FP8_BLOCK = 128  #: rows and columns of a weight block; channels of an activation group
FP8_INPUT = "fp8_group128"  #: input format of E4M3 activations with a scale per group
