"""Runtime of ``quantization.awq`` in plain torch: weights are dequantised as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glowplug.core.facts.stored_formats import quantization_config
from glowplug.core.layers.module import Target
from glowplug.core.layers.slices import expert_slices, linear_slices
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import (
    ExpertsMethod,
    ExpertsShape,
    LinearMethod,
    LinearShape,
    WeightTarget,
    Worker,
)
from glowplug.kernels.formats import awq as awq_format
from glowplug.plugins.quantization.awq.plugin import WORD, awq_group
from glowplug.plugins.quantization.dense.layers import DenseExperts, DenseLinear
from glowplug.plugins.quantization.shared.skipped_modules import left_alone, listed

if TYPE_CHECKING:
    from glowplug.plugins.quantization.awq.plugin import AwqOptions

#: callback for (qweight, qzeros, scales) of a slice, in the published layout
Put = Callable[[Tensor, Tensor, Tensor], None]


class AwqSource:
    """The tensors of an AWQ checkpoint: three for each quantised matrix.

    Attributes:
        group: number of inputs that share a scale; -1: all inputs of a row.
    """

    def __init__(self, plan: EnginePlan) -> None:
        facts = plan.facts.model
        self._tensors = facts.tensors
        self._listed = listed(quantization_config(facts))
        self.group = awq_group(facts)

    def covers(self, module: str) -> bool:
        """Return True if ``module`` is quantised in the checkpoint."""
        if self._tensors:
            return f"{module}.qweight" in self._tensors
        return not left_alone(module, self._listed, parts=True)

    def group_of(self, depth: int) -> int:
        """Return the number of inputs that share a scale in a slice of ``depth`` inputs."""
        return depth if self.group < 0 else self.group

    def targets(
        self,
        module: str,
        full: tuple[int, int],
        index: tuple[slice, slice],
        put: Put,
    ) -> Iterator[WeightTarget]:
        """Yield the load target of each of the three checkpoint tensors of a matrix slice.

        Args:
            module: module name in the checkpoint.
            full: numbers of outputs and inputs of the matrix.
            index: the slice of outputs and of inputs.
            put: called with the slice's three tensors once all have arrived.

        Raises:
            ValueError: the matrix or slice does not consist of whole words and groups.
        """
        (rows, columns) = full
        (outputs, inputs) = index
        if rows % awq_format.PACK:
            raise ValueError(
                f"{module}: {rows} outputs are not a multiple of the {awq_format.PACK} per word"
            )
        grid = -(-columns // self.group) if self.group > 0 else 1
        words = _divided(module, outputs, awq_format.PACK)
        groups = _divided(module, inputs, self.group) if self.group > 0 else slice(None)
        pending = _PendingMatrix(put)
        for leaf, shape, cut, dtype in (
            ("qweight", (columns, rows // awq_format.PACK), (inputs, words), WORD),
            ("qzeros", (grid, rows // awq_format.PACK), (groups, words), WORD),
            ("scales", (grid, rows), (groups, outputs), None),
        ):
            yield Target(
                f"{module}.{leaf}", shape, index=cut, dtype=dtype, put=pending.setter(leaf)
            )


def _divided(module: str, cut: slice, unit: int) -> slice:
    """Convert a slice of channels, ``cut``, to the slice of the groups that it consists of.

    ``module``: module name, for the error. ``unit``: number of channels of a group.

    Raises:
        ValueError: ``cut`` does not consist of whole groups.
    """
    if cut == slice(None):
        return cut
    if cut.start % unit or cut.stop % unit:
        raise ValueError(
            f"{module}: the slice from channel {cut.start} to {cut.stop} does not consist of whole "
            f"groups of {unit}"
        )
    return slice(cut.start // unit, cut.stop // unit)


@dataclass(eq=False)
class _PendingMatrix:
    """A matrix slice whose three tensors arrive in any order; ``put`` is called with all three."""

    put: Put
    held: dict[str, Tensor] = field(default_factory=dict)

    def setter(self, leaf: str) -> Callable[[Tensor], None]:
        """Return a callback that keeps the tensor ``leaf``; the third tensor triggers ``put``."""

        def set_tensor(value: Tensor) -> None:
            # a device tensor is a view of a larger block, which it would keep alive; hence the copy
            self.held[leaf] = value if value.is_cpu else value.clone()
            if len(self.held) == 3:
                self.put(self.held["qweight"], self.held["qzeros"], self.held["scales"])
                self.held.clear()

        return set_tensor


class Awq:
    """``QuantizationScheme`` with dequantised weights, which ranks split at group boundaries."""

    fused_shared = False

    def __init__(self, options: AwqOptions, plan: EnginePlan, worker: Worker) -> None:
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._device = worker.device
        self._source = AwqSource(plan)
        self.block = max(awq_format.PACK, self._source.group)

    def linear(self, shape: LinearShape) -> LinearMethod:
        return AwqLinear(shape, self._dtype, self._device, self._source)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        return AwqExperts(shape, self._dtype, self._device, self._source)

    def covers(self, module: str, rows: int, columns: int) -> bool:
        return self._source.covers(module)


def _into(destination: Tensor, source: AwqSource) -> Put:
    """Return a callback that dequantises a slice into ``destination`` [outputs, inputs]."""

    def put(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> None:
        group = source.group_of(qweight.shape[0])
        destination.copy_(awq_format.dequantize_published(qweight, qzeros, scales, group))

    return put


class AwqLinear(DenseLinear):
    """``LinearMethod`` over dequantised weights of an AWQ checkpoint."""

    def __init__(
        self, shape: LinearShape, dtype: torch.dtype, device: str, source: AwqSource
    ) -> None:
        super().__init__(shape, dtype, device)
        self._source = source

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, span in linear_slices(self.shape):
            yield from self._source.targets(
                name, full, index, _into(self.weight.t()[span], self._source)
            )
        yield from self.bias_targets()


class AwqExperts(DenseExperts):
    """``ExpertsMethod`` over dequantised weights of an AWQ checkpoint."""

    def __init__(
        self, shape: ExpertsShape, dtype: torch.dtype, device: str, source: AwqSource
    ) -> None:
        super().__init__(shape, dtype, device)
        self._source = source

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, expert, span in expert_slices(self.shape):
            held = self.w2[expert] if span is None else self.w13[expert, :, span]
            yield from self._source.targets(name, full, index, _into(held.t(), self._source))
