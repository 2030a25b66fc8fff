"""The runtime of ``quantization.w8a8_int8`` on CUDA: weights stay int8, and products run in int8.

Activations come quantised from whoever produced them, or are quantised here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glowplug.core.errors import GlowplugError
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
from glowplug.kernels.formats import int8, int8_triton as int8_quant
from glowplug.kernels.gemm import int8 as int8_gemm
from glowplug.kernels.moe.narrow import int8 as moe_gemm_int8
from glowplug.kernels.moe.sum import moe_sum
from glowplug.plugins.quantization.dense.experts_cuda import shared_slices
from glowplug.plugins.quantization.dense.layers import Biased, expert_slices, linear_slices
from glowplug.plugins.quantization.int8.cpu import Put, Source, W8A8Int8
from glowplug.plugins.quantization.shared.libraries import library
from glowplug.plugins.quantization.shared.provider_choice import INT8, INT8_ROWS, ByShape, Table

if TYPE_CHECKING:
    from glowplug.plugins.quantization.int8.plugin import W8A8Int8Options

FORMAT = "int8_token"
WHOLE = slice(None)


class W8A8Int8Cuda(W8A8Int8):
    """``QuantizationScheme``: a shared expert may ride with the routed ones."""

    fuses_shared = True

    def __init__(self, options: W8A8Int8Options, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._multiply = Multiply(options.gemm)

    def linear(self, shape: LinearShape) -> LinearMethod:
        return Int8LinearCuda(shape, self._dtype, self._device, self._source, self._multiply)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        return Int8ExpertsCuda(shape, self._dtype, self._device, self._source)


class Multiply:
    """x W^T in int8, by ``wanted``: "triton" (our own kernel), "cutlass" (as sgl_kernel builds it),
    or "auto".
    """

    def __init__(self, wanted: str = "auto", table: Table | None = None) -> None:
        self._wanted = wanted
        self._cutlass: Any = None if wanted == "triton" else self._find()
        self._fastest = ByShape(INT8.kind, INT8_ROWS, table)

    def _find(self) -> Any:
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
        """x int8 [T, K] and scales [T], weight int8 [N, K] and scales [N] -> [T, N]."""
        if self.pick(x.shape[0], len(weight), x.shape[1], dtype) == "cutlass":
            out: Tensor = self._cutlass(x, weight.t(), x_scales, scales, dtype, bias)
            return out
        return int8_gemm.gemm(x, x_scales, weight, scales, dtype, bias)

    def pick(self, rows: int, columns: int, depth: int, dtype: torch.dtype) -> str:
        """Who multiplies [rows, depth] x [columns, depth]^T with results in ``dtype``."""
        if self._cutlass is None or not rows or depth % 16 or columns % 8 or dtype is torch.float32:
            return "triton"
        return self._fastest.pick(rows, columns, depth) if self._wanted == "auto" else self._wanted


def quantized(x: Tensor | Quantized) -> tuple[Tensor, Tensor]:
    """Values and scales of activations, whether or not their producer has quantised them."""
    if not isinstance(x, Quantized):
        return int8_quant.quantize(x)
    assert x.scales is not None, f"activations in {FORMAT} have scales"
    return x.values, x.scales


class Int8LinearCuda(Biased):
    """``LinearMethod``. weight int8 [N, K] and scales float32 [N], fused parts behind one another."""

    input_format = FORMAT

    def __init__(
        self,
        shape: LinearShape,
        dtype: torch.dtype,
        device: str,
        source: Source,
        multiply: Multiply,
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
        values, scales = quantized(x)
        return self._multiply(values, scales, self.weight, self.scales, self._dtype, self.bias)

    def dense(self) -> Tensor:
        return int8.dequantize(self.weight, self.scales, self._dtype)


def into(weight: Tensor, scales: Tensor) -> Put:
    """Copies to int8 ``weight`` [R, C] and ``scales`` [R]."""

    def put(stored: Tensor, factors: Tensor) -> None:
        weight.copy_(stored)
        scales.copy_(factors)

    return put


class Int8ExpertsCuda:
    """``ExpertsMethod``: w13 int8 [E + S, 2I, H] with scales [E + S, 2I], w2 int8 [E + S, H, I]
    with [E + S, H]; the S last are slices of the shared expert."""

    input_format = FORMAT

    def __init__(
        self, shape: ExpertsShape, dtype: torch.dtype, device: str, source: Source
    ) -> None:
        assert not shape.shared or shape.inter == shape.inter_full, (
            "a shared expert rides along on one rank alone"
        )
        self.shape = shape
        self._dtype = dtype
        self._source = source
        count = shape.count + shape.shared
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
        for name, full, rows in shared_slices(self.shape):
            yield from self._source.targets(
                name, full, (WHOLE, WHOLE), partial(self._take_shared, rows)
            )

    def _take_shared(self, rows: slice | None, stored: Tensor, scales: Tensor) -> None:
        """``rows`` of w13 from gates or ups [S * I, H]; None: w2 from [H, S * I], whose slices
        share a row's scale.
        """
        shape = self.shape
        if rows is None:
            self.w2[shape.count :].copy_(
                stored.view(shape.hidden, shape.shared, shape.inter).transpose(0, 1)
            )
            self.scales2[shape.count :].copy_(scales)
        else:
            self.w13[shape.count :, rows].copy_(
                stored.view(shape.shared, shape.inter, shape.hidden)
            )
            self.scales13[shape.count :, rows].copy_(scales.view(shape.shared, shape.inter))

    def finalize(self) -> None:
        return

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        rows = moe_gemm_int8.expert_rows(
            *quantized(x), self.w13, self.scales13, self.w2, self.scales2, ids, weights, self._dtype
        )
        return Parts(rows, ids) if self.shape.parts else moe_sum(rows, ids)
