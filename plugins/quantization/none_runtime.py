"""Runtime of ``quantization.none``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import ExpertsMethod, ExpertsShape, LinearShape, Worker
from glowplug.kernels.launch.cards import tiles_run_on
from glowplug.plugins.quantization.dense.layers import DenseExperts, DenseLinear
from glowplug.plugins.quantization.dense.layers_cuda import CudaLinear

if TYPE_CHECKING:
    from glowplug.plugins.quantization.none import NoQuantizationOptions


class NoQuantization:
    """``QuantizationScheme`` that keeps the weights of every module dense."""

    block = 1

    def __init__(self, options: NoQuantizationOptions, plan: EnginePlan, worker: Worker) -> None:
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._device = worker.device
        self._on_cuda = torch.device(worker.device).type == "cuda"
        self.fused_shared = tiles_run_on(worker.device)

    def linear(self, shape: LinearShape) -> DenseLinear:
        method = CudaLinear if self._on_cuda else DenseLinear
        return method(shape, self._dtype, self._device)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        if self.fused_shared:
            from glowplug.plugins.quantization.dense.experts_cuda import CudaExperts

            return CudaExperts(shape, self._dtype, self._device)
        return DenseExperts(shape, self._dtype, self._device)

    def covers(self, module: str, rows: int, columns: int) -> bool:
        return True
