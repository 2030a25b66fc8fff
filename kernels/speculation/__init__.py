"""Kernels of speculative algorithms."""
