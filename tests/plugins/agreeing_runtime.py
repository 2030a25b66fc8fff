"""The runtime of the ``agreeing`` weight source."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.plugins.weights.random_runtime import RandomSource
from tests.plugins.agreeing import AgreeingOptions


class AgreeingSource(RandomSource):
    """A source of random weights in which ``eh_proj`` is the identity on the embedding's half, and
    random on the hidden state's.
    """

    def __init__(self, options: AgreeingOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._spread = options.spread

    def _scaled(
        self, name: str, shape: tuple[int, ...], dtype: str | None, noise: Tensor
    ) -> Tensor:
        made = super()._scaled(name, shape, dtype, noise)
        if name.endswith("eh_proj.weight"):
            assert made.shape == shape, "ranks do not divide eh_proj"
            hidden = shape[0]
            same = torch.eye(hidden, dtype=made.dtype, device=made.device)
            return torch.cat([same, 0.7 * made[:, hidden:]], dim=1)
        coded = made.dtype is torch.float8_e4m3fn or not made.is_floating_point()  # its scales grow
        if (".o_proj." in name or ".down_proj." in name) and not coded:
            return made * self._spread
        return made
