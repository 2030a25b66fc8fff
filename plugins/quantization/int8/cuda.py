"""Runtime of ``quantization.w8a8_int8`` on CUDA: int8 weights and int8 GEMMs.

Activations are quantised by the op that produces them, or here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glowplug.core.errors import GlowplugError
from glowplug.core.layers.slices import expert_slices, linear_slices
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import (
    ExpertsMethod,
    ExpertsShape,
    LinearMethod,
    LinearShape,
    Parts,
    Quantized,
    WeightTarget,
    Worker,
)
from glowplug.kernels.formats import int8, int8_triton
from glowplug.kernels.gemm import int8 as int8_gemm
from glowplug.kernels.moe.narrow import int8 as moe_int8
from glowplug.kernels.moe.sum import moe_sum
from glowplug.plugins.quantization.dense.experts_cuda import shared_slices
from glowplug.plugins.quantization.dense.layers import Biased
from glowplug.plugins.quantization.int8.cpu import Int8Source, Put, W8A8Int8
from glowplug.plugins.quantization.shared.libraries import library
from glowplug.plugins.quantization.shared.provider_choice import INT8, INT8_ROWS, ByShape
from glowplug.plugins.quantization.shared.provider_tables import Table
from glowplug.plugins.quantization.shared.quantized_input import quantized

if TYPE_CHECKING:
    from glowplug.plugins.quantization.int8.plugin import W8A8Int8Options

FORMAT = "int8_token"  #: input format of quantised activations
ALL = slice(None)


class W8A8Int8Cuda(W8A8Int8):
    """``QuantizationScheme`` with int8 weights; the shared expert may be fused."""

    fused_shared = True

    def __init__(self, options: W8A8Int8Options, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._multiply = Int8Gemm(options.gemm)

    def linear(self, shape: LinearShape) -> LinearMethod:
        return Int8LinearCuda(shape, self._dtype, self._device, self._source, self._multiply)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        return Int8ExpertsCuda(shape, self._dtype, self._device, self._source)


class Int8Gemm:
    """The GEMM x W^T in int8.

    Args:
        wanted: "triton" (our own kernel), "cutlass" (sgl_kernel's build), or "auto" (the fastest
            measured one that is installed).
        table: measurements for "auto"; None: those of the current GPU.

    Raises:
        GlowplugError: ``wanted`` is "cutlass" and it cannot be used.
    """

    def __init__(self, wanted: str = "auto", table: Table | None = None) -> None:
        self._wanted = wanted
        self._cutlass: Any = None if wanted == "triton" else self._find()
        self._fastest = ByShape(INT8.kind, INT8_ROWS, table)

    def _find(self) -> Any:
        """Return CUTLASS's int8 GEMM function; with "auto", None if it cannot be used."""
        try:
            return library("gemm", "cutlass", "sgl_kernel", ("int8_scaled_mm",))
        except GlowplugError:
            if self._wanted == "cutlass":
                raise
            return None

    def __call__(
        self,
        x: Tensor,
        x_scales: Tensor,
        weight: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None,
    ) -> Tensor:
        """Return x W^T in ``dtype``.

        Args:
            x: int8 [T, K].
            x_scales: float32 [T].
            weight: int8 [N, K].
            scales: float32 [N].
            dtype: of the result.
            bias: [N] or None.

        Returns:
            [T, N].
        """
        if self.pick(x.shape[0], len(weight), x.shape[1], dtype) == "cutlass":
            out: Tensor = self._cutlass(x, weight.t(), x_scales, scales, dtype, bias)
            return out
        return int8_gemm.gemm(x, x_scales, weight, scales, dtype, bias)

    def pick(self, rows: int, columns: int, depth: int, dtype: torch.dtype) -> str:
        """Return the name of the provider for [rows, depth] x [columns, depth]^T in ``dtype``."""
        if self._cutlass is None or not rows or depth % 16 or columns % 8 or dtype is torch.float32:
            return "triton"
        return self._fastest.pick(rows, columns, depth) if self._wanted == "auto" else self._wanted


class Int8LinearCuda(Biased):
    """``LinearMethod`` in int8, with fused matrices stacked along the rows.

    Attributes:
        weight: int8 [N, K].
        scales: float32 [N].
    """

    input_format = FORMAT

    def __init__(
        self,
        shape: LinearShape,
        dtype: torch.dtype,
        device: str,
        source: Int8Source,
        multiply: Int8Gemm,
    ) -> None:
        super().__init__(shape, dtype, device)
        self._dtype = dtype
        self._source = source
        self._multiply = multiply
        self.weight = torch.empty(sum(shape.outputs), shape.inputs, dtype=torch.int8, device=device)
        self.scales = torch.empty(sum(shape.outputs), device=device)

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, span in linear_slices(self.shape):
            yield from self._source.targets(
                name, full, index, into(self.weight[span], self.scales[span])
            )
        yield from self.bias_targets()

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values, scales = quantized(x, int8_triton.quantize)
        return self._multiply(values, scales, self.weight, self.scales, self._dtype, self.bias)

    def dense(self) -> Tensor:
        return int8.dequantize(self.weight, self.scales, self._dtype)


def into(weight: Tensor, scales: Tensor) -> Put:
    """Return a callback that copies a loaded slice to int8 ``weight`` [R, C], ``scales`` [R]."""

    def put(stored: Tensor, factors: Tensor) -> None:
        weight.copy_(stored)
        scales.copy_(factors)

    return put


class Int8ExpertsCuda:
    """``ExpertsMethod`` in int8; the last S experts are slices of the shared expert.

    Attributes:
        w13: int8 [E + S, 2I, H].
        w2: int8 [E + S, H, I].
        scales13: float32 [E + S, 2I].
        scales2: float32 [E + S, H].
    """

    input_format = FORMAT

    def __init__(
        self, shape: ExpertsShape, dtype: torch.dtype, device: str, source: Int8Source
    ) -> None:
        self.shape = shape
        self._dtype = dtype
        self._source = source
        count = shape.count + shape.fused_shared
        self.w13 = torch.empty(
            count, 2 * shape.inter, shape.hidden, dtype=torch.int8, device=device
        )
        self.w2 = torch.empty(count, shape.hidden, shape.inter, dtype=torch.int8, device=device)
        self.scales13 = torch.empty(count, 2 * shape.inter, device=device)
        self.scales2 = torch.empty(count, shape.hidden, device=device)

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, expert, span in expert_slices(self.shape):
            held = (
                (self.w2[expert], self.scales2[expert])
                if span is None
                else (self.w13[expert, span], self.scales13[expert, span])
            )
            yield from self._source.targets(name, full, index, into(*held))
        for name, full, index, rows in shared_slices(self.shape):
            yield from self._source.targets(name, full, index, partial(self._take_shared, rows))

    def _take_shared(self, rows: slice | None, stored: Tensor, scales: Tensor) -> None:
        """Store a checkpoint matrix of the shared expert, cut into slices for the fused experts.

        Args:
            rows: rows of w13 for a gate or up projection; None for w2, where all slices of a row
                have the same scale.
            stored: int8 [S * I, H], or for w2 [H, S * I].
            scales: scale of each row of ``stored``.
        """
        shape = self.shape
        if rows is None:
            self.w2[shape.count :].copy_(
                stored.reshape(shape.hidden, shape.fused_shared, shape.inter).transpose(0, 1)
            )
            self.scales2[shape.count :].copy_(scales)
        else:
            self.w13[shape.count :, rows].copy_(
                stored.reshape(shape.fused_shared, shape.inter, shape.hidden)
            )
            self.scales13[shape.count :, rows].copy_(scales.view(shape.fused_shared, shape.inter))

    def finalize(self) -> None:
        return

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        rows = moe_int8.expert_rows(
            *quantized(x, int8_triton.quantize),
            self.w13,
            self.scales13,
            self.w2,
            self.scales2,
            ids,
            weights,
            self._dtype,
        )
        return Parts(rows, ids) if self.shape.parts else moe_sum(rows, ids)
