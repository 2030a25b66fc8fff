"""Runtime of ``quantization.block_fp8`` in plain torch, for devices without FP8 GEMMs.

Weights are dequantised once, as they arrive, into the compute dtype; activations are rounded to FP8
values. A result equals that of an FP8 GEMM with float32 accumulation, up to the order of summation.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    Quantized,
    WeightTarget,
    Worker,
)
from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.formats import fp8
from glowplug.kernels.launch.cards import tiles_run_on
from glowplug.plugins.quantization.block_fp8.blocks import STORED, BlockWeight
from glowplug.plugins.quantization.dense.layers import DenseExperts, DenseLinear
from glowplug.plugins.quantization.shared.skipped_modules import left_alone

if TYPE_CHECKING:
    from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options

FORMAT = "fp8_group128_values"  #: input format of rounded activations
PLAIN = "plain"  #: input format of activations in the compute dtype


class BlockFp8:
    """``QuantizationScheme`` with dequantised weights.

    A checkpoint that is not FP8 is quantised block by block while it loads. Ranks may split a
    dimension anywhere, because a weight is dequantised by the blocks of the whole checkpoint
    matrix. Activation groups start at a rank's first channel.
    """

    block = 1
    fused_shared = False

    def __init__(self, options: BlockFp8Options, plan: EnginePlan, worker: Worker) -> None:
        facts = plan.facts.model
        stated = facts.config.get("quantization_config") or {}
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._device = worker.device
        self._native = facts.quant_method == "fp8"
        self._format = FORMAT if options.activations == "dynamic" else PLAIN
        self._tensors = facts.tensors if self._native else {}
        self._skipped = tuple(stated.get("modules_to_not_convert") or ())
        # NOTE: torch's grouped GEMMs in float32 read the group sizes on the host and cannot be
        # captured in a CUDA graph.
        self._in_triton = self._format == PLAIN and tiles_run_on(self._device)

    def linear(self, shape: LinearShape) -> LinearMethod:
        return Fp8Linear(shape, self._dtype, self._device, self._format, self._native)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        if self._in_triton:
            # NOTE: imported late, because it imports triton
            from glowplug.plugins.quantization.block_fp8.dense_cuda import DequantizedExperts

            return DequantizedExperts(shape, self._dtype, self._device, self._native)
        return Fp8Experts(shape, self._dtype, self._device, self._format, self._native)

    def covers(self, module: str, rows: int, columns: int) -> bool:
        weight = self._tensors.get(f"{module}.weight")
        if weight is not None:
            return weight.dtype == STORED
        return not left_alone(module, self._skipped)


def _as_read(x: Tensor | Quantized, input_format: str) -> Tensor:
    """Return the activations x as the layer reads them: unchanged, or rounded to FP8 values.

    They are rounded unless ``input_format`` is plain. ``Quantized`` input has been rounded by its
    producer.
    """
    if isinstance(x, Quantized):
        return x.values
    return x if input_format == PLAIN else fp8.fake_quantize_tokens(x)


class Fp8Linear(DenseLinear):
    """``LinearMethod`` over dequantised weights; each fused matrix has its own grid of blocks."""

    def __init__(
        self, shape: LinearShape, dtype: torch.dtype, device: str, input_format: str, native: bool
    ) -> None:
        super().__init__(shape, dtype, device)
        self.input_format = input_format
        self._native = native

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, span in linear_slices(self.shape):
            yield from BlockWeight(name, full, index, self.weight.t()[span], self._native).targets()
        yield from self.bias_targets()

    def apply(self, x: Tensor | Quantized) -> Tensor:
        return super().apply(_as_read(x, self.input_format))


class Fp8Experts(DenseExperts):
    """``ExpertsMethod`` over dequantised weights.

    The input is rounded once for all experts, the inner activations once for all pairs of a token
    and an expert.
    """

    def __init__(
        self, shape: ExpertsShape, dtype: torch.dtype, device: str, input_format: str, native: bool
    ) -> None:
        super().__init__(shape, dtype, device)
        self.input_format = input_format
        self._native = native

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, expert, span in expert_slices(self.shape):
            held = self.w2[expert] if span is None else self.w13[expert, :, span]
            yield from BlockWeight(name, full, index, held.t(), self._native).targets()

    def activate(self, hidden: Tensor) -> Tensor:
        return (
            silu_and_mul(hidden) if self.input_format == PLAIN else fp8.silu_and_mul_rounded(hidden)
        )

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor:
        return super().apply(_as_read(x, self.input_format), ids, weights)
