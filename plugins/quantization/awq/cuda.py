"""Runtime of ``quantization.awq`` on CUDA: weights stay int4, in our kernels' layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
from glowplug.kernels.formats import awq as awq_format
from glowplug.kernels.gemm import int4_awq
from glowplug.kernels.moe.narrow import int4_awq as moe_int4_awq
from glowplug.kernels.moe.sum import moe_sum
from glowplug.plugins.quantization.awq.cpu import Awq, AwqSource, Put
from glowplug.plugins.quantization.dense.experts_cuda import shared_slices
from glowplug.plugins.quantization.dense.layers import Biased
from glowplug.plugins.quantization.shared.provider_choice import AWQ, AWQ_ROWS, ByShape
from glowplug.plugins.quantization.shared.provider_tables import Table

if TYPE_CHECKING:
    from glowplug.plugins.quantization.awq.plugin import AwqOptions

ALL = slice(None)


class AwqCuda(Awq):
    """``QuantizationScheme`` with int4 weights.

    The shared expert may be fused if its slices consist of whole groups.
    """

    def __init__(self, options: AwqOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        width = plan.facts.model.config.get("moe_intermediate_size") or 0
        self.fused_shared = self._source.group < 0 or width % self._source.group == 0
        self._multiply = AwqGemm(options.gemm)

    def linear(self, shape: LinearShape) -> LinearMethod:
        return AwqLinearCuda(shape, self._dtype, self._device, self._source, self._multiply)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        return AwqExpertsCuda(shape, self._dtype, self._device, self._source)


class AwqGemm:
    """The GEMM x W^T over int4 weights.

    Args:
        wanted: "triton" (our own kernel), "cublas" (after dequantising the weight), or "auto" (the
            fastest measured one).
        table: measurements for "auto"; None: those of the current GPU.
    """

    def __init__(self, wanted: str = "auto", table: Table | None = None) -> None:
        self._wanted = wanted
        self._fastest = ByShape(AWQ.kind, AWQ_ROWS, table)

    def __call__(
        self, x: Tensor, packed: Tensor, factors: Tensor, group: int, bias: Tensor | None
    ) -> Tensor:
        """Return x W^T for the int4 weight W.

        Args:
            x: [T, K].
            packed: weight as in ``kernels/gemm/int4_awq.py``.
            factors: scales and zeros as in ``kernels/gemm/int4_awq.py``.
            group: number of inputs that share a scale.
            bias: [N] or None.

        Returns:
            [T, N].
        """
        if self.pick(x.shape[0], packed.shape[1], x.shape[1]) == "triton":
            return int4_awq.gemm(
                x if x.stride(-1) == 1 else x.contiguous(), packed, factors, group, bias
            )
        weight = int4_awq.dequantize(packed, factors, x.shape[1], group, x.dtype).t()
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def pick(self, rows: int, columns: int, depth: int) -> str:
        """Return the name of the provider for the GEMM [rows, depth] x [columns, depth]^T."""
        if not rows:
            return "triton"
        return self._fastest.pick(rows, columns, depth) if self._wanted == "auto" else self._wanted


class PackedWeights:
    """Weights of E = ``count`` matrices [N = columns, depth] in our kernels' int4 layout.

    Attributes:
        packed: int16 [E, blocks, N, 32].
        factors: int32 [E, groups, N].
    """

    def __init__(
        self,
        count: int,
        columns: int,
        depth: int,
        source: AwqSource,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        group = source.group_of(depth)
        self._dtype = dtype
        self.packed = torch.empty(
            count,
            -(-depth // awq_format.PACKED_INPUTS),
            columns,
            awq_format.PLANE,
            dtype=torch.int16,
            device=device,
        )
        self.factors = torch.empty(count, depth // group, columns, dtype=torch.int32, device=device)
        self.weights = moe_int4_awq.Weights(self.packed, self.factors, group, depth)

    def into(self, number: int, columns: slice) -> Put:
        """Return a callback that repacks a loaded slice into ``columns`` of matrix ``number``."""

        def put(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> None:
            self.store(
                number,
                columns,
                awq_format.unpack(qweight.to(self.packed.device)),
                awq_format.unpack(qzeros.to(self.packed.device)),
                scales,
            )

        return put

    def store(
        self, number: int, columns: slice, numbers: Tensor, zeros: Tensor, scales: Tensor
    ) -> None:
        """Store a matrix slice in ``columns`` of matrix ``number``.

        Args:
            number: index of the matrix.
            columns: the slice's outputs.
            numbers: unpacked int4 weights, uint8 [depth, n].
            zeros: unpacked zeros, [groups, n].
            scales: [groups, n].
        """
        self.packed[number, :, columns].copy_(awq_format.pack_blocks(numbers.t()))
        factors = awq_format.pack_factors(scales.to(zeros.device), zeros, self._dtype)
        self.factors[number, :, columns].copy_(factors)


class AwqLinearCuda(Biased):
    """``LinearMethod`` over int4 weights."""

    input_format = "plain"

    def __init__(
        self,
        shape: LinearShape,
        dtype: torch.dtype,
        device: str,
        source: AwqSource,
        multiply: AwqGemm,
    ) -> None:
        super().__init__(shape, dtype, device)
        self._dtype = dtype
        self._source = source
        self._multiply = multiply
        self._held = PackedWeights(1, sum(shape.outputs), shape.inputs, source, dtype, device)
        self._group = self._held.weights.group
        self.weight = self._held.packed[0]
        self.factors = self._held.factors[0]

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, span in linear_slices(self.shape):
            yield from self._source.targets(name, full, index, self._held.into(0, span))
        yield from self.bias_targets()

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        return self._multiply(values, self.weight, self.factors, self._group, self.bias)

    def dense(self) -> Tensor:
        return int4_awq.dequantize(
            self.weight, self.factors, self.shape.inputs, self._group, self._dtype
        )


class AwqExpertsCuda:
    """``ExpertsMethod`` over int4 weights; the last S experts are slices of the shared expert.

    Attributes:
        w13: [E + S, 2I, H].
        w2: [E + S, H, I].
    """

    input_format = "plain"

    def __init__(
        self, shape: ExpertsShape, dtype: torch.dtype, device: str, source: AwqSource
    ) -> None:
        self.shape = shape
        self._source = source
        count = shape.count + shape.fused_shared
        self.w13 = PackedWeights(count, 2 * shape.inter, shape.hidden, source, dtype, device)
        self.w2 = PackedWeights(count, shape.hidden, shape.inter, source, dtype, device)

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, expert, span in expert_slices(self.shape):
            put = self.w2.into(expert, ALL) if span is None else self.w13.into(expert, span)
            yield from self._source.targets(name, full, index, put)
        for name, full, index, rows in shared_slices(self.shape):
            yield from self._source.targets(name, full, index, partial(self._take_shared, rows))

    def _take_shared(
        self, rows: slice | None, qweight: Tensor, qzeros: Tensor, scales: Tensor
    ) -> None:
        """Store a checkpoint matrix of the shared expert, cut into slices for the fused experts.

        Args:
            rows: rows of w13 for the gate or up projection (S * I outputs); None: w2 (S * I
                inputs).
            qweight: packed weights of the matrix.
            qzeros: packed zeros of the matrix.
            scales: scales of the matrix.
        """
        shape = self.shape
        device = self.w13.packed.device
        parts = [
            awq_format.unpack(qweight.to(device)),
            awq_format.unpack(qzeros.to(device)),
            scales,
        ]
        held, columns, dim = (self.w2, ALL, 0) if rows is None else (self.w13, rows, 1)
        for number in range(shape.fused_shared):
            held.store(
                shape.count + number, columns, *(self._slice(part, number, dim) for part in parts)
            )

    def _slice(self, part: Tensor, number: int, dim: int) -> Tensor:
        """Return slice ``number`` of the shared expert's tensor ``part``, cut along ``dim``.

        ``part`` itself is returned if ``dim`` is 0, the inputs, and ``part`` holds the scales or
        zeros of a single group: it then applies to every slice.
        """
        return (
            part
            if part.shape[dim] == 1 and dim == 0
            else part.chunk(self.shape.fused_shared, dim)[number]
        )

    def finalize(self) -> None:
        return

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        values = x.values if isinstance(x, Quantized) else x
        rows = moe_int4_awq.expert_rows(
            values.contiguous(), self.w13.weights, self.w2.weights, ids, weights
        )
        return Parts(rows, ids) if self.shape.parts else moe_sum(rows, ids)
