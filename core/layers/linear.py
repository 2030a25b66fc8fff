"""Linear layers, fused from several checkpoint parts and split over ranks.

The weights and the GEMM belong to the quantization method; this layer has names, shapes and shards.
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
    PartialSum,
    Parts,
    QuantizationScheme,
    Quantized,
    Shard,
    WeightTarget,
)
from glowplug.core.protocols.build_context import BuildContext

FORMAT_PLAIN = "plain"

#: hidden states [T, hidden], or terms that the next norm sums
Terms = Tensor | Parts | PartialSum


class Both(NamedTuple):
    """Activations both plain and in a linear layer's format, for layers that read both.

    Attributes:
        plain: [T, N] in the activation dtype.
        cast: the same in the format.
    """

    plain: Tensor
    cast: Quantized


def both_formats(input_format: str) -> str:
    """Return the name, in ``Ops.fused``, of the format ``Both`` of plain and ``input_format``."""
    return f"{FORMAT_PLAIN}+{input_format}"


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor ``{name}.weight`` of a fused layer.

    Attributes:
        name: module path of the part.
        rows: number of rows of the tensor.
        role: how ranks share the rows: "column", "shared_column", "heads", "vocab" or
            "replicated".
        unit: number of rows that stay together (those of a head, for example).
        bias: True: the part also has a ``{name}.bias``.
        held: (first, count) of the units on this rank, if the layer decides it; None: the
            parallelism strategies decide.
    """

    name: str
    rows: int
    role: str = "column"
    unit: int = 1
    bias: bool = False
    held: tuple[int, int] | None = None


class Linear(Module):
    """A linear layer y = x W^T + b whose rows are those of all parts, in order.

    Args:
        name: module path, for messages.
        inputs: number of columns of every part in the checkpoint.
        parts: the fused parts.
        input_role: "replicated", or "row", "shared_row" or "heads_row" if ranks hold a slice of the
            columns.
        input_unit: number of columns that stay together.
        reduce: True: sum partial results over the ranks; False: the caller does.
        wide: True: results may be float32, whatever dtype the activations have.

    Attributes:
        shards: this rank's rows of each part.
        outputs: number of these rows.
        methods: quantization methods of the parts; normally one.
        input_format: format in which activations may come.
        partial: mesh axes over which the caller has to sum.
        forward_parts: ``forward``, or the method's ``apply_parts``, whose result may be ``Parts``
            or a ``PartialSum`` for a norm that sums them.
    """

    _sums_in_norm = False  #: the next norm sums over the ranks

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
        self._inputs = inputs
        columns = self._shard(input_role, parts[0], inputs, input_unit)
        self.shards = [self._rows(part) for part in parts]
        self.outputs = tuple(shard.size for shard in self.shards)
        self.methods = self._methods(list(zip(parts, self.shards, strict=True)), columns)
        self.input_format = agreed_format(self.methods)
        self._set_sums(columns, reduce)
        self.forward_parts: Callable[[Any], Terms] = self.forward
        if len(self.methods) == 1:
            self._bind(self.methods[0], context)

    def _set_sums(self, columns: Shard, reduce: bool) -> None:
        """Set whether the layer or its caller sums the results of a slice of the columns."""
        self.partial = (columns.axis,) if columns.reduce and not reduce else ()
        self._collectives = self._context.collectives if columns.reduce and reduce else None
        self._axis = columns.axis

    def _bind(self, method: LinearMethod, context: BuildContext) -> None:
        """Set ``forward`` and ``forward_parts`` to the functions that the layer's one method needs.

        - Without an all-reduce, ``forward`` is the method's ``apply``. ``forward_parts`` is its
          ``apply_parts`` if it has one and norms add up parts, else also ``apply``.
        - If the next norm computes the all-reduce, ``forward_parts`` is ``forward_in_norm``.
        - Otherwise both stay the layer's own ``forward``.
        """
        self._terms: Callable[[Any], Tensor | Parts] = method.apply
        if context.ops.adds_parts:
            self._terms = getattr(method, "apply_parts", method.apply)
        if self._collectives is None:
            self.forward = method.apply  # type: ignore[method-assign]
            self.forward_parts = self._terms
        elif context.sums_in_norm:
            self._sums_in_norm = True
            self.forward_parts = self.forward_in_norm

    def _rows(self, part: Part) -> Shard:
        """Return this rank's rows of ``part``."""
        if part.held is not None:
            first, count = part.held
            return Shard(first * part.unit, count * part.unit, part.rows)
        return self._shard(part.role, part, part.rows, part.unit)

    def _scheme(self, part: Part) -> QuantizationScheme:
        if part.role == "vocab" and self._context.online:
            return self._context.plain  # the plan counts the head in the compute dtype
        return self._context.scheme_for(part.name, part.rows, self._inputs)

    def _shard(self, role: str, part: Part, full: int, unit: int) -> Shard:
        """Return this rank's elements of a dimension.

        Args:
            role: how ranks share the dimension; see ``Part.role``.
            part: the part, or the first of those that share the dimension.
            full: size of the dimension.
            unit: the dimension is split only at multiples of this number and of the scheme's block.
        """
        if role == "replicated":
            return Shard(0, full, full)
        block = self._scheme(part).block
        shards = self._context.parallel
        shard = shards.shard(role, part.name, full // unit, block // gcd(block, unit))
        return replace(shard, start=shard.start * unit, size=shard.size * unit, full=full)

    def _methods(self, parts: list[tuple[Part, Shard]], columns: Shard) -> list[LinearMethod]:
        """Return one quantization method for each run of parts with the same scheme.

        The parts of a run all have biases, or none has. Normally there is one run.
        """
        methods = []
        for (scheme, bias), run in groupby(
            parts, key=lambda item: (self._scheme(item[0]), item[0].bias)
        ):
            held = list(run)
            methods.append(
                self._context.linear(
                    scheme,
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
                    ),
                )
            )
        return methods

    def own_targets(self) -> Iterator[WeightTarget]:
        """Yield the targets of all methods."""
        for method in self.methods:
            yield from method.targets()

    def finalize(self) -> None:
        """Finalize all methods."""
        for method in self.methods:
            method.finalize()

    def stored_blocks(self) -> tuple[Tensor, Tensor] | None:
        """Return the weight in block FP8, or None if it is not stored so.

        The layer must have a single quantization method, which has a ``stored_blocks`` of its own.

        Returns:
            E4M3 values [N, K] and the float32 scales of their 128 x 128 blocks.
        """
        stored = getattr(self.methods[0], "stored_blocks", None) if len(self.methods) == 1 else None
        found: tuple[Tensor, Tensor] | None = None if stored is None else stored()
        return found

    def forward(self, x: Tensor | Quantized) -> Tensor:
        """Return y = x W^T + b, [T, sum(outputs)], for x [T, inputs]."""
        parts = [method.apply(x) for method in self.methods]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if self._collectives is None else self._collectives.all_reduce(y, self._axis)

    def forward_in_norm(self, x: Tensor | Quantized) -> Terms:
        """Return [T, sum(outputs)], for a norm that computes the sum over the ranks if it can.

        The result is a ``PartialSum`` if ranks have to be summed and norms do so.
        """
        if self._sums_in_norm:
            return PartialSum(self._terms(x), self._axis)
        return self.forward(x)

    def dense(self) -> Tensor:
        """Return the weight [sum(outputs), inputs] in the compute dtype; after ``finalize``."""
        return (
            torch.cat([method.dense() for method in self.methods])
            if len(self.methods) > 1
            else self.methods[0].dense()
        )


def agreed_format(consumers: Sequence[Any]) -> str:
    """Return the ``input_format`` that all ``consumers`` of a tensor share, else "plain"."""
    formats = {consumer.input_format for consumer in consumers}
    return formats.pop() if len(formats) == 1 else FORMAT_PLAIN


def producer(ops: Ops, name: str, *consumers: Any) -> Callable[..., Any]:
    """Return the variant of the op ``name`` that returns the format shared by ``consumers``.

    If the ops table has no such variant, return the op itself, whose result is plain.
    """
    wanted = agreed_format(consumers)
    return ops.fused.get((name, wanted)) or getattr(ops, name)


def produced_format(ops: Ops, name: str, *consumers: Any) -> str:
    """Return the format of the results of the op that :func:`producer` returns."""
    wanted = agreed_format(consumers)
    return wanted if (name, wanted) in ops.fused else FORMAT_PLAIN


def caster(ops: Ops, *consumers: Any) -> Callable[[Tensor], Tensor | Quantized] | None:
    """Return the function that casts plain activations to the format that ``consumers`` share.

    Return None if the ops table has no cast to that format, for example if it is "plain".
    """
    return ops.fused.get(("cast", agreed_format(consumers)))
