"""Dense linear layers on CUDA devices."""
from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.protocols import LinearShape, Quantized
from glowplug.plugins.quantization.dense import DenseLinear

HALF = (torch.bfloat16, torch.float16)


class CudaLinear(DenseLinear):
    """The weight lies as checkpoints have it, [sum(outputs), inputs], which loads fastest; cuBLAS takes either."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: str) -> None:
        super().__init__(shape, dtype, "meta")
        self.rows = torch.empty(sum(shape.outputs), shape.inputs, dtype=dtype, device=device)
        self.weight = self.rows.t()
        if self.bias is not None:
            self.bias = torch.empty(self.bias.shape, dtype=dtype, device=device)
        self._widens = shape.wide and dtype in HALF and not shape.bias

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        if self._widens:
            return torch.mm(values, self.weight, out_dtype=torch.float32)
        return super().apply(values)
