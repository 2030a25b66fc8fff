"""The runtime of the ``agreeing`` weight source."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import WeightTarget, Worker
from glowplug.plugins.weights.random_runtime import RandomSource
from tests.plugins.agreeing import AgreeingOptions


class AgreeingSource(RandomSource):
    """A source of random weights in which ``eh_proj`` is the identity on the embedding's half, and
    random on the hidden state's.
    """

    def __init__(self, options: AgreeingOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._spread = options.spread

    def _on(self, device: torch.device, target: WeightTarget) -> Tensor:
        made = super()._on(device, target)
        if target.name.endswith("eh_proj.weight"):
            hidden, columns = target.shape
            identity = torch.eye(hidden, columns, dtype=made.dtype, device=device)[target.index]
            embedding = (torch.arange(columns, device=device) < hidden)[target.index[1]]
            return torch.where(embedding, identity, 0.7 * made)
        coded = made.dtype is torch.float8_e4m3fn or not made.is_floating_point()  # its scales grow
        if (".o_proj." in target.name or ".down_proj." in target.name) and not coded:
            return made * self._spread
        return made
