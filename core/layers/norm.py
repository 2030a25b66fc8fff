"""RMS normalisation, alone or with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from glowplug.core.layers.linear import produced_format, producer
from glowplug.core.layers.module import Module, Target
from glowplug.core.protocols import PartialSum, Parts, WeightTarget
from glowplug.core.protocols.build_context import BuildContext


class RmsNorm(Module):
    """RMS norm with the weight ``{name}.weight`` [size].

    Args:
        size: elements of a row.
        eps: epsilon of the norm.
        consumers: the layers that read the result; no other code may read it.
    """

    def __init__(
        self, context: BuildContext, name: str, size: int, eps: float, *consumers: Any
    ) -> None:
        self.name = name
        self.eps = eps
        self.weight = torch.ones(size, dtype=context.dtype, device=context.worker.device)
        self._norm = producer(context.ops, "rms_norm", *consumers)
        self._add_norm = producer(context.ops, "add_rms_norm", *consumers)
        reduced_norm = getattr(context.collectives, "reduced_norm", None)
        self._add_reduced = (
            None
            if reduced_norm is None
            else reduced_norm(
                produced_format(context.ops, "add_rms_norm", *consumers), self._add_norm
            )
        )

    def own_targets(self) -> Iterator[WeightTarget]:
        """Yield the target of the weight."""
        yield Target(f"{self.name}.weight", tuple(self.weight.shape), self.weight)

    def forward(self, x: Tensor) -> Any:
        """Return x [T, size] normed, in the consumers' input format."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor | Parts | PartialSum, residual: Tensor | None) -> tuple[Any, Tensor]:
        """Return (normed(residual + x), residual + x); if residual is None, (normed(x), x)."""
        if residual is None:
            assert isinstance(x, Tensor), "``Parts`` need a residual to be added to"
            return self._norm(x, self.weight, self.eps), x
        if isinstance(x, PartialSum):
            assert self._add_reduced is not None, "layers pass sums to norms that compute them"
            found: tuple[Any, Tensor] = self._add_reduced(
                x.terms, x.axis, residual, self.weight, self.eps
            )
            return found
        return self._add_norm(x, residual, self.weight, self.eps)  # type: ignore[no-any-return]
