"""The AWQ scheme for a worker's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import QuantizationScheme, Worker
from glowplug.plugins.quantization.awq.cpu import Awq

if TYPE_CHECKING:
    from glowplug.plugins.quantization.awq.plugin import AwqOptions


def awq(options: AwqOptions, plan: EnginePlan, worker: Worker) -> QuantizationScheme:
    """Return the AWQ scheme for ``worker``'s device: int4 weights on CUDA, else dequantised."""
    if torch.device(worker.device).type == "cuda" and not options.dequantize:
        # NOTE: imported late, because it imports triton
        from glowplug.plugins.quantization.awq.cuda import AwqCuda

        return AwqCuda(options, plan, worker)
    return Awq(options, plan, worker)
