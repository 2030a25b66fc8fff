"""Routed experts of block FP8 checkpoints, dequantised while loading, for Triton on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from glowplug.core.layers.slices import expert_slices
from glowplug.core.protocols import ExpertsShape, WeightTarget
from glowplug.plugins.quantization.block_fp8.blocks import BlockWeight
from glowplug.plugins.quantization.dense.experts_cuda import CudaExperts


class DequantizedExperts(CudaExperts):
    """``ExpertsMethod`` over dense weights, for activations that are not rounded to FP8."""

    def __init__(self, shape: ExpertsShape, dtype: torch.dtype, device: str, native: bool) -> None:
        assert not shape.fused_shared, "this method does not fuse the shared expert"
        super().__init__(shape, dtype, device)
        self._native = native

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, expert, rows in expert_slices(self.shape):
            held = self.w2[expert] if rows is None else self.w13[expert, rows]
            yield from BlockWeight(name, full, index, held, self._native).targets()
