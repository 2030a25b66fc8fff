"""The W8A8 int8 scheme for a worker's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import QuantizationScheme, Worker
from glowplug.plugins.quantization.int8.cpu import W8A8Int8

if TYPE_CHECKING:
    from glowplug.plugins.quantization.int8.plugin import W8A8Int8Options


def w8a8_int8(options: W8A8Int8Options, plan: EnginePlan, worker: Worker) -> QuantizationScheme:
    """Return the int8 scheme for ``worker``'s device.

    CUDA devices run int8 GEMMs unless ``activations = "none"``; otherwise weights are dequantised.
    """
    if torch.device(worker.device).type == "cuda" and options.activations != "none":
        # NOTE: imported late, because it imports triton
        from glowplug.plugins.quantization.int8.cuda import W8A8Int8Cuda

        return W8A8Int8Cuda(options, plan, worker)
    return W8A8Int8(options, plan, worker)
