"""Dense linear layers on CUDA devices: cuBLAS, and kernels of our own for few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.protocols import LinearShape, Parts, Quantized
from glowplug.kernels.launch.cards import tiles_run_on
from glowplug.plugins.quantization.dense.layers import DenseLinear

HALF = (torch.bfloat16, torch.float16)


class CudaLinear(DenseLinear):
    """The weight lies as checkpoints have it, [sum(outputs), inputs], which loads fastest; cuBLAS
    takes either.
    """

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: str) -> None:
        super().__init__(shape, dtype, "meta")
        self.rows = torch.empty(sum(shape.outputs), shape.inputs, dtype=dtype, device=device)
        self.weight = self.rows.t()
        if self.bias is not None:
            self.bias = torch.empty(self.bias.shape, dtype=dtype, device=device)
        half = dtype in HALF and self.rows.is_cuda
        self._widens = shape.wide and half and not shape.bias
        self._few = _few if half and tiles_run_on(device) else None
        self._wide = _wide if self._widens and tiles_run_on(device) else None

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        if self._widens:
            scores = None if self._wide is None else self._wide(values, self.rows)
            return (
                torch.mm(values, self.weight, out_dtype=torch.float32) if scores is None else scores
            )
        product = None if self._few is None else self._few(values, self.rows, self.bias)
        return super().apply(values) if product is None else product

    def apply_parts(self, x: Tensor | Quantized) -> Tensor | Parts:
        """As ``apply``, or parts of it, for who adds them up anyway."""
        parts = (
            _parts(x, self.rows)
            if isinstance(x, Tensor) and self._few is not None and self.bias is None
            else None
        )
        return self.apply(x) if parts is None else parts


def _few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The product where a kernel of our own is faster than cuBLAS."""
    from glowplug.kernels.gemm import few_rows as skinny_gemm  # behind a check that Triton is there

    tile = skinny_gemm.rule(len(x), *weight.shape)
    return None if tile is None else skinny_gemm.multiply(x, weight, bias, tile)


def _wide(x: Tensor, weight: Tensor) -> Tensor | None:
    """The product in float32 where a table of this card has a kernel of our own that is faster than
    cuBLAS.
    """
    from glowplug.kernels.gemm import lm_head as head_gemm  # behind a check that Triton is there

    config = head_gemm.config_for(len(x), *weight.shape)
    return (
        None
        if config is None or not head_gemm.fits(x, weight)
        else head_gemm.multiply(x, weight, config)
    )


def _parts(x: Tensor, weight: Tensor) -> Parts | None:
    """The product in parts where they and their sum are sooner there than the product."""
    if not x.is_contiguous() or x.dtype != weight.dtype:
        return None
    from glowplug.kernels.gemm import (
        split_depth as slice_gemm,  # behind a check that Triton is there
    )

    if not slice_gemm.fits(len(x), weight.shape[0], weight.shape[1], x.dtype, x.device):
        return None
    return Parts(slice_gemm.multiply(x, weight), slice_gemm.counted(len(x), x.device))
