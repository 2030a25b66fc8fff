"""The block FP8 scheme for a worker's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.plugins.quantization.block_fp8.cpu import BlockFp8

if TYPE_CHECKING:
    from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options


def block_fp8(options: BlockFp8Options, plan: EnginePlan, worker: Worker) -> BlockFp8:
    """Return the block FP8 scheme for ``worker``'s device.

    CUDA devices run FP8 GEMMs unless ``activations = "none"``; otherwise weights are dequantised.
    """
    if torch.device(worker.device).type == "cuda" and options.activations != "none":
        # NOTE: imported late, because it imports triton
        from glowplug.plugins.quantization.block_fp8.cuda import BlockFp8Cuda

        return BlockFp8Cuda(options, plan, worker)
    return BlockFp8(options, plan, worker)
