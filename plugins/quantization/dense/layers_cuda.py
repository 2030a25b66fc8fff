"""Dense linear layers on CUDA devices: cuBLAS, and our own kernels for few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.protocols import LinearShape, Parts, Quantized
from glowplug.kernels.launch.cards import tiles_run_on
from glowplug.plugins.quantization.dense.layers import DenseLinear

HALF_DTYPES = (torch.bfloat16, torch.float16)


class CudaLinear(DenseLinear):
    """``LinearMethod`` with the weight stored as in checkpoints, [sum(outputs), inputs].

    ``sum(outputs)`` is the number of outputs of the fused matrices together. The weight loads
    fastest without a transposition, and cuBLAS multiplies by it as fast as by a transposed one.
    """

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: str) -> None:
        super().__init__(shape, dtype, "meta")
        self.rows = torch.empty(sum(shape.outputs), shape.inputs, dtype=dtype, device=device)
        self.weight = self.rows.t()
        if self.bias is not None:
            self.bias = torch.empty(self.bias.shape, dtype=dtype, device=device)
        half = dtype in HALF_DTYPES and self.rows.is_cuda
        self._widens = shape.wide and half and not shape.bias
        self._few_rows = _few_rows if half and tiles_run_on(device) else None
        self._lm_head = _lm_head if self._widens and tiles_run_on(device) else None

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        if self._widens:
            scores = None if self._lm_head is None else self._lm_head(values, self.rows)
            return (
                torch.mm(values, self.weight, out_dtype=torch.float32) if scores is None else scores
            )
        result = None if self._few_rows is None else self._few_rows(values, self.rows, self.bias)
        return super().apply(values) if result is None else result

    def apply_parts(self, x: Tensor | Quantized) -> Tensor | Parts:
        """Return the result of ``apply``, or partial sums of it that the next op adds up anyway."""
        parts = (
            _split_parts(x, self.rows)
            if isinstance(x, Tensor) and self._few_rows is not None and self.bias is None
            else None
        )
        return self.apply(x) if parts is None else parts


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return x W^T + bias by our own kernel, or None where cuBLAS is faster."""
    from glowplug.kernels.gemm import few_rows  # imported late: it needs Triton

    tile = few_rows.few_rows_tile(len(x), *weight.shape)
    return None if tile is None else few_rows.multiply(x, weight, bias, tile)


def _lm_head(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return the LM head's x W^T in float32 by our own kernel, or None to use cuBLAS.

    Our kernel runs where this GPU's tuned table has a configuration faster than cuBLAS.
    """
    from glowplug.kernels.gemm import lm_head  # imported late: it needs Triton

    config = lm_head.lm_head_config(len(x), *weight.shape)
    return (
        None
        if config is None or not lm_head.lm_head_fits(x, weight)
        else lm_head.multiply(x, weight, config)
    )


def _split_parts(x: Tensor, weight: Tensor) -> Parts | None:
    """Return x W^T as partial sums by our own kernel, or None where an unsplit GEMM is faster.

    The time of adding up the partial sums is counted.
    """
    if not x.is_contiguous() or x.dtype != weight.dtype:
        return None
    from glowplug.kernels.gemm import split_depth  # imported late: it needs Triton

    if not split_depth.split_depth_pays(
        len(x), weight.shape[0], weight.shape[1], x.dtype, x.device
    ):
        return None
    return Parts(split_depth.multiply(x, weight), split_depth.split_ids(len(x), x.device))
