"""Runtime of the test collectives "norm_collectives"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from glowplug.core.protocols import Parts
from glowplug.kernels.launch.sums import add_pairs
from glowplug.plugins.collectives.torch_distributed_runtime import Gloo


class NormCollectives(Gloo):
    """Collectives of gloo with ``reduced_norm``.

    Attributes:
        sums: axis of each sum that a norm has computed.
    """

    sums: list[str]

    def reduced_norm(self, input_format: str, add_norm: Callable[..., Any]) -> Callable[..., Any]:
        self.sums = getattr(self, "sums", [])

        def reduce(
            terms: Tensor | Parts, axis: str, residual: Tensor, weight: Tensor, eps: float
        ) -> Any:
            whole = add_pairs(*terms) if isinstance(terms, Parts) else terms
            self.sums.append(axis)
            return add_norm(self.all_reduce(whole, axis), residual, weight, eps)

        return reduce
