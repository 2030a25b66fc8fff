"""Kernels in Triton for CUDA devices. Importing a module of this package imports triton."""
