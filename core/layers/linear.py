"""Linear layers, fused from several checkpoint parts and split over ranks.

The weights and the product belong to the quantization method; this layer knows names, shapes and
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glowplug.core.layers.module import Module
from glowplug.core.protocols import (
    LinearMethod,
    LinearShape,
    Ops,
    Parts,
    Quantized,
    Shard,
    WeightTarget,
)
from glowplug.core.protocols.build_context import BuildContext

FORMAT_PLAIN = "plain"


class Both(NamedTuple):
    """Activations as they are and in a linear's format, for layers that read both."""

    plain: Tensor
    cast: Quantized


def both_formats(input_format: str) -> str:
    """The format under which ``Ops.fused`` has producers of ``Both``."""
    return f"{FORMAT_PLAIN}+{input_format}"


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor ``{name}.weight`` of ``rows`` rows in a fused layer.

    ``role`` says how ranks share the rows ("column", "heads", "vocab", "replicated"); they are
    dealt in units of ``unit`` rows (a head's, for example). ``bias``: it has a ``{name}.bias`` too.
    ``held``: (first, count) of the units on this rank, where the layer itself knows; None: the
    parallel strategies deal them.
    """

    name: str
    rows: int
    role: str = "column"
    unit: int = 1
    bias: bool = False
    held: tuple[int, int] | None = None


class Linear(Module):
    """y = x W^T + b for the rows of all parts, in order: ``forward(x [T, inputs]) -> [T,
    sum(outputs)]``.

    Args:
        name: module path, for messages.
        inputs: columns of every part in the checkpoint.
        parts: what is fused.
        input_role: "replicated", or "row" when ranks hold a slice of the columns (of ``input_unit``
            columns at a time).
        reduce: sum partial results over the ranks here; False leaves that to the caller.
        wide: results may be float32, whatever the activations are.

    ``partial`` names the axes over which the caller has to sum; ``shards`` are the rows held of
    each part.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        inputs: int,
        parts: Sequence[Part],
        *,
        input_role: str = "replicated",
        input_unit: int = 1,
        reduce: bool = True,
        wide: bool = False,
    ) -> None:
        self.name = name
        self._wide = wide
        self._context = context
        columns = self._shard(input_role, parts[0].name, inputs, input_unit)
        self.shards = [self._rows(part) for part in parts]
        self.outputs = tuple(shard.size for shard in self.shards)
        self.methods = self._methods(list(zip(parts, self.shards, strict=True)), columns)
        self.input_format = agreed_format(self.methods)
        self.partial = (columns.axis,) if columns.reduce and not reduce else ()
        self._collectives = context.collectives if columns.reduce and reduce else None
        self._axis = columns.axis
        if len(self.methods) == 1 and self._collectives is None:
            self.forward = self.methods[0].apply  # type: ignore[method-assign]
        #: as ``forward``, but a method that has ``apply_parts`` may answer ``Parts``, for a norm
        #: that adds them up
        self.forward_parts: Callable[[Any], Tensor | Parts] = self.forward
        if len(self.methods) == 1 and context.worker.ranks == 1 and context.ops.adds_parts:
            self.forward_parts = getattr(self.methods[0], "apply_parts", self.forward)

    def _rows(self, part: Part) -> Shard:
        if part.held is not None:
            first, count = part.held
            return Shard(first * part.unit, count * part.unit, part.rows)
        return self._shard(part.role, part.name, part.rows, part.unit)

    def _shard(self, role: str, name: str, full: int, unit: int) -> Shard:
        """This rank's elements; ``unit`` elements are dealt together, and as many units as make up
        whole blocks.
        """
        if role == "replicated":
            return Shard(0, full, full)
        block = self._context.scheme_for(name).block
        shard = self._context.parallel.shard(role, name, full // unit, block // gcd(block, unit))
        return replace(shard, start=shard.start * unit, size=shard.size * unit, full=full)

    def _methods(self, parts: list[tuple[Part, Shard]], columns: Shard) -> list[LinearMethod]:
        """One method for each run of parts with the same scheme, all with or all without bias;
        normally one.
        """
        methods = []
        for (scheme, bias), run in groupby(
            parts, key=lambda item: (self._context.scheme_for(item[0].name), item[0].bias)
        ):
            held = list(run)
            methods.append(
                scheme.linear(
                    LinearShape(
                        name=self.name,
                        parts=tuple(part.name for part, _ in held),
                        outputs=tuple(shard.size for _, shard in held),
                        inputs=columns.size,
                        row_starts=tuple(shard.start for _, shard in held),
                        col_start=columns.start,
                        full=tuple((part.rows, columns.full) for part, _ in held),
                        bias=bias,
                        wide=self._wide,
                    )
                )
            )
        return methods

    def own_targets(self) -> Iterator[WeightTarget]:
        for method in self.methods:
            yield from method.targets()

    def finalize(self) -> None:
        for method in self.methods:
            method.finalize()

    def stored_blocks(self) -> tuple[Tensor, Tensor] | None:
        """The weight's E4M3 values [N, K] and the float32 scales of its 128 x 128 blocks, where one
        method keeps them so (it then has a method of this name)."""
        stored = getattr(self.methods[0], "stored_blocks", None) if len(self.methods) == 1 else None
        found: tuple[Tensor, Tensor] | None = None if stored is None else stored()
        return found

    def forward(self, x: Tensor | Quantized) -> Tensor:
        parts = [method.apply(x) for method in self.methods]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if self._collectives is None else self._collectives.all_reduce(y, self._axis)

    def dense(self) -> Tensor:
        """[sum(outputs), inputs] in the compute dtype. After ``finalize``."""
        return (
            torch.cat([method.dense() for method in self.methods])
            if len(self.methods) > 1
            else self.methods[0].dense()
        )


def agreed_format(consumers: Sequence[Any]) -> str:
    """The ``input_format`` that all ``consumers`` of one tensor share, or "plain"."""
    formats = {consumer.input_format for consumer in consumers}
    return formats.pop() if len(formats) == 1 else FORMAT_PLAIN


def producer(ops: Ops, name: str, *consumers: Any) -> Callable[..., Any]:
    """The variant of op ``name`` that hands its consumers the format they want, or the plain op."""
    wanted = agreed_format(consumers)
    return ops.fused.get((name, wanted)) or getattr(ops, name)


def caster(ops: Ops, *consumers: Any) -> Callable[[Tensor], Tensor | Quantized] | None:
    """Turns plain activations into the format that ``consumers`` share, once for all of them; None:
    nothing to do.
    """
    return ops.fused.get(("cast", agreed_format(consumers)))
