"""The runtime of ``quantization.block_fp8`` in plain torch, where products do not run in FP8.

Weights are dequantised once, as they arrive, into the compute dtype; activations are rounded to
what FP8 would hold. A product is then that of an FP8 GEMM with float32 accumulation, up to the
order of summation.
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

FORMAT = "fp8_group128_values"
PLAIN = "plain"
STORED = "float8_e4m3fn"
#: last name of modules that published FP8 checkpoints leave alone
LEFT_ALONE = frozenset({"lm_head", "head", "gate", "embed_tokens", "eh_proj"})


def block_fp8(options: BlockFp8Options, plan: EnginePlan, worker: Worker) -> BlockFp8:
    """The scheme for ``worker``'s device: products in FP8 on CUDA, of dequantised weights
    elsewhere.
    """
    if torch.device(worker.device).type == "cuda" and options.activations != "none":
        from glowplug.plugins.quantization.block_fp8.cuda import (
            BlockFp8Cuda,  # it imports this module
        )

        return BlockFp8Cuda(options, plan, worker)
    return BlockFp8(options, plan, worker)


class BlockFp8:
    """``QuantizationScheme``. A checkpoint that is not FP8 is quantised block by block while it
    loads.

    Ranks split dimensions anywhere, because a weight is dequantised by its own matrix's blocks;
    groups of activations begin with a rank's first channel.
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
        # NOTE: torch's grouped products of float32 read the groups on the host, so that no graph
        # could hold them.
        self._in_triton = self._format == PLAIN and tiles_run_on(self._device)

    def linear(self, shape: LinearShape) -> LinearMethod:
        return Fp8Linear(shape, self._dtype, self._device, self._format, self._native)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        if self._in_triton:
            from glowplug.plugins.quantization.block_fp8.dense_cuda import (
                DequantizedExperts,  # it imports this module
            )

            return DequantizedExperts(shape, self._dtype, self._device, self._native)
        return Fp8Experts(shape, self._dtype, self._device, self._format, self._native)

    def covers(self, module: str) -> bool:
        weight = self._tensors.get(f"{module}.weight")
        if weight is not None:
            return weight.dtype == STORED
        if module.rpartition(".")[2] in LEFT_ALONE:
            return False
        return not any(module == name or module.startswith(f"{name}.") for name in self._skipped)


class BlockWeight:
    """One checkpoint matrix on its way into ``destination`` [rows, columns]: weight and scales,
    whichever comes first.

    The slice may begin anywhere within a block; the blocks are always those of the checkpoint's own
    matrix.
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
        """``value``: every block that this rank holds some of."""
        stored, scales = fp8.quantize_weight(value)
        (first, rows), (left, columns) = zip(self._offsets(), self.destination.shape, strict=True)
        whole = fp8.dequantize_weight(stored, scales, self.destination.dtype)
        self.destination.copy_(whole[first : first + rows, left : left + columns])

    def _offsets(self) -> tuple[int, int]:
        """First row and column held, counted from the beginning of their block."""
        rows, columns = self.index
        return (rows.start or 0) % fp8.BLOCK, (columns.start or 0) % fp8.BLOCK


def _kept(value: Tensor) -> Tensor:
    """``value`` until its counterpart comes: on a device it is part of a larger block, which would
    be kept as well.
    """
    return value if value.is_cpu else value.clone()


def blocks_of(cut: slice, full: int) -> slice:
    """The blocks that ``cut`` of a dimension of ``full`` elements touches."""
    if cut == slice(None):
        return cut
    return part_of(
        cut.start // fp8.BLOCK,
        -(-cut.stop // fp8.BLOCK) - cut.start // fp8.BLOCK,
        -(-full // fp8.BLOCK),
    )


def elements_of(blocks: slice, full: int) -> slice:
    """The elements of ``blocks`` of a dimension of ``full``."""
    if blocks == slice(None):
        return blocks
    start = blocks.start * fp8.BLOCK
    return part_of(start, min(blocks.stop * fp8.BLOCK, full) - start, full)


def _as_read(x: Tensor | Quantized, input_format: str) -> Tensor:
    """Activations in ``input_format``: as they are, or rounded, which a producer may have done
    already.
    """
    if isinstance(x, Quantized):
        return x.values
    return x if input_format == PLAIN else fp8.fake_quantize_tokens(x)


class Fp8Linear(DenseLinear):
    """``LinearMethod``: each fused part keeps its own block grid."""

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
    """``ExpertsMethod``: the input is rounded once for all experts, the inner activations once for
    all pairs.
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
