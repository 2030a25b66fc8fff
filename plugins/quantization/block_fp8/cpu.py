"""Runtime of ``quantization.block_fp8`` in plain torch, for devices without FP8 GEMMs.

Weights are dequantised once, as they arrive, into the compute dtype; activations are rounded to FP8
values. A result equals that of an FP8 GEMM with float32 accumulation, up to the order of summation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glowplug.core.layers.module import Target, part_of
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
from glowplug.plugins.quantization.dense.layers import (
    DenseExperts,
    DenseLinear,
    expert_slices,
    linear_slices,
)

if TYPE_CHECKING:
    from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options

FORMAT = "fp8_group128_values"  #: input format of rounded activations
PLAIN = "plain"  #: input format of activations in the compute dtype
STORED = "float8_e4m3fn"  #: dtype of quantised weights in the checkpoint
#: last names of modules that published FP8 checkpoints leave unquantised
UNQUANTIZED = frozenset({"lm_head", "head", "gate", "embed_tokens", "eh_proj"})


def block_fp8(options: BlockFp8Options, plan: EnginePlan, worker: Worker) -> BlockFp8:
    """Return the scheme for ``worker``'s device.

    CUDA devices run FP8 GEMMs unless ``activations = "none"``; otherwise weights are dequantised.
    """
    if torch.device(worker.device).type == "cuda" and options.activations != "none":
        # imported late: the module imports this one
        from glowplug.plugins.quantization.block_fp8.cuda import BlockFp8Cuda

        return BlockFp8Cuda(options, plan, worker)
    return BlockFp8(options, plan, worker)


class BlockFp8:
    """``QuantizationScheme`` with dequantised weights.

    A checkpoint that is not FP8 is quantised block by block while it loads. Ranks may split a
    dimension anywhere, because a weight is dequantised by the blocks of the whole checkpoint
    matrix. Activation groups start at a rank's first channel.
    """

    block = 1
    fuses_shared = False

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
            # imported late: the module imports this one
            from glowplug.plugins.quantization.block_fp8.dense_cuda import DequantizedExperts

            return DequantizedExperts(shape, self._dtype, self._device, self._native)
        return Fp8Experts(shape, self._dtype, self._device, self._format, self._native)

    def covers(self, module: str) -> bool:
        weight = self._tensors.get(f"{module}.weight")
        if weight is not None:
            return weight.dtype == STORED
        if module.rpartition(".")[2] in UNQUANTIZED:
            return False
        return not any(module == name or module.startswith(f"{name}.") for name in self._skipped)


class BlockWeight:
    """One checkpoint matrix, dequantised into ``destination`` while it loads.

    Weight and scales may arrive in either order. The slice may begin anywhere within a block;
    blocks are always those of the whole checkpoint matrix.

    Attributes:
        name: module name in the checkpoint.
        full: shape of the checkpoint matrix.
        index: this rank's slice of it.
        destination: [rows, columns] of the slice, in the compute dtype.
        native: the checkpoint is FP8.
    """

    def __init__(
        self,
        name: str,
        full: tuple[int, int],
        index: tuple[slice, slice],
        destination: Tensor,
        native: bool,
    ) -> None:
        self.name = name
        self.full = full
        self.index = index
        self.destination = destination
        self.native = native
        self._stored: Tensor | None = None
        self._scales: Tensor | None = None

    def targets(self) -> Iterator[WeightTarget]:
        grid = tuple(-(-size // fp8.BLOCK) for size in self.full)
        blocks = tuple(blocks_of(cut, size) for cut, size in zip(self.index, self.full))
        if not self.native:
            whole = tuple(elements_of(cut, size) for cut, size in zip(blocks, self.full))
            yield Target(f"{self.name}.weight", self.full, index=whole, put=self._quantize)
            return
        yield Target(
            f"{self.name}.weight", self.full, index=self.index, dtype=STORED, put=self._take_stored
        )
        yield Target(f"{self.name}.weight_scale_inv", grid, index=blocks, put=self._take_scales)

    def _take_stored(self, value: Tensor) -> None:
        self._stored = _kept(value)
        self._finish()

    def _take_scales(self, value: Tensor) -> None:
        self._scales = _kept(value)
        self._finish()

    def _finish(self) -> None:
        if self._stored is None or self._scales is None:
            return
        rows, columns = self._offsets()
        self.destination.copy_(
            fp8.dequantize_weight(self._stored, self._scales, self.destination.dtype, rows, columns)
        )
        self._stored = self._scales = None

    def _quantize(self, value: Tensor) -> None:
        """Quantise and dequantise ``value``, all blocks that this rank's slice touches."""
        stored, scales = fp8.quantize_weight(value)
        (first, rows), (left, columns) = zip(self._offsets(), self.destination.shape, strict=True)
        whole = fp8.dequantize_weight(stored, scales, self.destination.dtype)
        self.destination.copy_(whole[first : first + rows, left : left + columns])

    def _offsets(self) -> tuple[int, int]:
        """Return the slice's first row and column, relative to the start of their block."""
        rows, columns = self.index
        return (rows.start or 0) % fp8.BLOCK, (columns.start or 0) % fp8.BLOCK


def _kept(value: Tensor) -> Tensor:
    """Return ``value`` for keeping until its counterpart arrives.

    On a device ``value`` is a view of a larger block, which it would keep alive; hence the copy.
    """
    return value if value.is_cpu else value.clone()


def blocks_of(cut: slice, full: int) -> slice:
    """Return the slice of blocks that ``cut`` of a dimension of ``full`` elements touches."""
    if cut == slice(None):
        return cut
    return part_of(
        cut.start // fp8.BLOCK,
        -(-cut.stop // fp8.BLOCK) - cut.start // fp8.BLOCK,
        -(-full // fp8.BLOCK),
    )


def elements_of(blocks: slice, full: int) -> slice:
    """Return the slice of elements that ``blocks`` covers in a dimension of ``full`` elements."""
    if blocks == slice(None):
        return blocks
    start = blocks.start * fp8.BLOCK
    return part_of(start, min(blocks.stop * fp8.BLOCK, full) - start, full)


def _as_read(x: Tensor | Quantized, input_format: str) -> Tensor:
    """Return activations in ``input_format``: unchanged, or rounded to FP8 values.

    ``Quantized`` input has been rounded by its producer.
    """
    if isinstance(x, Quantized):
        return x.values
    return x if input_format == PLAIN else fp8.fake_quantize_tokens(x)


class Fp8Linear(DenseLinear):
    """``LinearMethod`` over dequantised weights; each fused matrix has its own block grid."""

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

    The input is rounded once for all experts, the inner activations once for all pairs.
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
