"""Kernels in Triton for CUDA devices. Importing a module of this package imports triton,
other than ``h200``, ``tuned`` and ``moe_tiles``, which plans read."""
