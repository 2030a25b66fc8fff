"""Runtime of ``quantization.block_fp8`` on CUDA: E4M3 weights in blocks and FP8 GEMMs.

Activations are quantised by the op that produces them, or here.
"""

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
from glowplug.kernels.formats import fp8, fp8_triton
from glowplug.kernels.formats.fp8_block import FP8_BLOCK, FP8_INPUT
from glowplug.kernels.moe import gemm_hopper as moe_gemm_hopper
from glowplug.kernels.moe.fp8 import experts as fp8_experts, tiles as moe_fp8_tiles
from glowplug.kernels.moe.sum import moe_sum
from glowplug.plugins.quantization.block_fp8.cpu import BlockFp8
from glowplug.plugins.quantization.block_fp8.cutlass import CutlassExperts
from glowplug.plugins.quantization.block_fp8.expert_libraries import GroupedExperts
from glowplug.plugins.quantization.block_fp8.gemm_providers import Providers
from glowplug.plugins.quantization.block_fp8.grouped import Grouped
from glowplug.plugins.quantization.block_fp8.masked import Masked
from glowplug.plugins.quantization.block_fp8.weights import (
    SlicedMatrix,
    StoredMatrix,
    blocks,
    whole_blocks,
)
from glowplug.plugins.quantization.dense.experts_cuda import shared_slices
from glowplug.plugins.quantization.dense.layers import Biased
from glowplug.plugins.quantization.shared.expert_bytes import provider_for_dtype
from glowplug.plugins.quantization.shared.quantized_input import quantized

if TYPE_CHECKING:
    from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options


class BlockFp8Cuda(BlockFp8):
    """``QuantizationScheme`` with FP8 weights.

    Ranks split dimensions at block boundaries, and the shared expert may be fused.
    """

    block = FP8_BLOCK
    fused_shared = True

    def __init__(self, options: BlockFp8Options, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._providers = Providers(options.gemm, dtype=self._dtype)
        self._grouped = grouped(provider_for_dtype(options.experts, self._dtype.itemsize))

    def linear(self, shape: LinearShape) -> LinearMethod:
        return Fp8LinearCuda(shape, self._dtype, self._device, self._native, self._providers)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        return Fp8ExpertsCuda(shape, self._dtype, self._device, self._native, self._grouped)


def grouped(wanted: str) -> GroupedExperts:
    """Return the library that computes routed experts.

    ``wanted``: value of ``quantization.experts``.
    """
    if wanted == "deep_gemm_masked":
        return Masked()
    return CutlassExperts() if wanted == "cutlass" else Grouped(wanted)


class Fp8LinearCuda(Biased):
    """``LinearMethod`` with E4M3 weights, whose fused matrices each have their own block scales.

    If every matrix begins at a block boundary, both in the fused weight and in the checkpoint, the
    scales are stored per block. Otherwise they are stored per row of the weight.

    Attributes:
        padded: E4M3 [ceil128(N), K], the weight with zero rows up to whole blocks.
        weight: E4M3 [N, K], a view of ``padded``.
        scales: float32 [ceil(N / 128), ceil(K / 128)], or [N, ceil(K / 128)] with scales per row.
        columns: N, the number of outputs.
    """

    input_format = FP8_INPUT

    def __init__(
        self,
        shape: LinearShape,
        dtype: torch.dtype,
        device: str,
        native: bool,
        providers: Providers,
    ) -> None:
        super().__init__(shape, dtype, device)
        self._dtype = dtype
        self._native = native
        self._providers = providers
        self.columns = sum(shape.outputs)
        depth = shape.inputs
        if shape.col_start % FP8_BLOCK:
            raise ValueError(
                f"{shape.name}: the slice from column {shape.col_start} does not begin at a block "
                f"of {FP8_BLOCK}"
            )
        inside = [span.start for *_, span in linear_slices(shape)] + list(shape.row_starts)
        self._by_row = any(start % FP8_BLOCK for start in inside)
        self.padded = torch.empty(
            whole_blocks(self.columns), depth, dtype=torch.float8_e4m3fn, device=device
        )
        self.padded[self.columns :].zero_()
        self.weight = self.padded[: self.columns]
        self.scales = torch.empty(
            self.columns if self._by_row else blocks(self.columns), blocks(depth), device=device
        )

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, span in linear_slices(self.shape):
            rows = span if self._by_row else slice(span.start // FP8_BLOCK, blocks(span.stop))
            yield from StoredMatrix(
                name, full, index, self.weight[span], self.scales[rows], self._native, self._by_row
            ).targets()
        yield from self.bias_targets()

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values, scales = quantized(x, fp8_triton.quantize)
        rows, depth = values.shape
        if not rows:
            return torch.empty(0, self.columns, dtype=self._dtype, device=values.device)
        if self._by_row:
            y = self._providers.any_shape()(values, scales, self.weight, self.scales, self._dtype)
        else:
            provider = self._providers.pick(rows, self.columns, depth)
            y = provider(
                values,
                scales,
                self.padded if provider.pads else self.weight,
                self.scales,
                self._dtype,
            )
            y = y if y.shape[1] == self.columns else y[:, : self.columns]
        return y if self.bias is None else y.add_(self.bias)

    def dense(self) -> Tensor:
        if not self._by_row:
            return fp8.dequantize_weight(self.weight, self.scales, self._dtype)
        wide = self.scales.repeat_interleave(FP8_BLOCK, 1)[:, : self.shape.inputs]
        return self.weight.float().mul_(wide).to(self._dtype)

    def stored_blocks(self) -> tuple[Tensor, Tensor] | None:
        """Return the weight and its block scales; None if the scales are stored per row.

        See ``core.layers.linear.Linear``.
        """
        return None if self._by_row else (self.weight, self.scales)


class Fp8ExpertsCuda:
    """``ExpertsMethod`` in FP8; the last S experts are slices of the fused shared expert.

    A width I that is not a multiple of the block size is padded with zeros.

    Attributes:
        w13: E4M3 [E + S, 2I, H].
        w2: E4M3 [E + S, H, I].
        scales13: float32 [E + S, 2I / 128, ceil(H / 128)].
        scales2: float32 [E + S, ceil(H / 128), I / 128].
        count: E + S, the number of experts, slices of the shared expert included.
        inter: I, padded to whole blocks.
    """

    input_format = FP8_INPUT

    def __init__(
        self,
        shape: ExpertsShape,
        dtype: torch.dtype,
        device: str,
        native: bool,
        grouped: GroupedExperts,
    ) -> None:
        if shape.inter_start % FP8_BLOCK:
            raise ValueError(
                f"{shape.prefix}: the slice from channel {shape.inter_start} does not begin at a "
                f"block of {FP8_BLOCK}"
            )
        self.shape = shape
        self._dtype = dtype
        self._native = native
        self.count = shape.count + shape.fused_shared
        self.inter = whole_blocks(shape.inter)
        # the libraries support only whole blocks
        self._grouped = grouped if shape.hidden % FP8_BLOCK == 0 else None
        self._has_hopper = moe_gemm_hopper.card_is_hopper() and moe_fp8_tiles.fits_hopper(
            shape.hidden, dtype.itemsize
        )
        self._allocate(device)

    def _allocate(self, device: str) -> None:
        """Allocate the weights, set to zero where they are padded, and scales, set to 1."""
        hidden = self.shape.hidden
        empty = partial(torch.empty, dtype=torch.float8_e4m3fn, device=device)
        ones = partial(torch.ones, device=device)
        self.w13 = empty(self.count, 2 * self.inter, hidden)
        self.w2 = empty(self.count, hidden, self.inter)
        if self.inter != self.shape.inter:
            self.w13.zero_()
            self.w2.zero_()
        self.scales13 = ones(self.count, 2 * self.inter // FP8_BLOCK, blocks(hidden))
        self.scales2 = ones(self.count, blocks(hidden), self.inter // FP8_BLOCK)

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, expert, span in expert_slices(self.shape):
            values, scales = self._part(None if span is None else int(span.start > 0))
            yield from StoredMatrix(
                name, full, index, values[expert], scales[expert], self._native
            ).targets()
        if self.shape.fused_shared:
            yield from self._shared_targets()

    def _part(self, half: int | None) -> tuple[Tensor, Tensor]:
        """Return the values and scales of one projection of all experts, without padding.

        ``half``: 0 for the gate, 1 for the up and None for the down projection.
        """
        inter = self.shape.inter
        groups = blocks(self.shape.inter)
        if half is None:
            return self.w2[:, :, :inter], self.scales2[:, :, :groups]
        first = half * self.inter
        return self.w13[:, first : first + inter], self.scales13[
            :, first // FP8_BLOCK : first // FP8_BLOCK + groups
        ]

    def _shared_targets(self) -> Iterator[WeightTarget]:
        shape = self.shape
        for name, full, index, rows in shared_slices(shape):
            values, scales = self._part(None if rows is None else int(rows.start > 0))
            yield from SlicedMatrix(
                name,
                full,
                index,
                int(rows is None),
                values[shape.count :],
                scales[shape.count :],
                self._native,
            ).targets()

    def finalize(self) -> None:
        return

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        values, scales = quantized(x, fp8_triton.quantize)
        tokens, per_token = ids.shape
        if not tokens:
            return torch.empty(0, self.shape.hidden, dtype=self._dtype, device=values.device)
        held = (self.w13, self.scales13, self.w2, self.scales2)
        if self._grouped is not None and self._grouped.pays(tokens, per_token, self.count):
            return self._grouped.experts(values, scales, *held, ids, weights, self._dtype)
        config = moe_fp8_tiles.fp8_experts_config(
            tokens, per_token, self.count, self.inter, self.shape.hidden, self._has_hopper
        )
        rows = fp8_experts.products(values, scales, *held, ids, weights, self._dtype, config)
        return Parts(rows, ids) if self.shape.parts else moe_sum(rows, ids)
