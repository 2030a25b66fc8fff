"""Runtime of the sampler "triton": one object a rank, driven by the engine loop."""
from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.protocols import Limits
from glowplug.kernels.triton import sampling as kernel
from glowplug.plugins.sampling.row_state import GREEDY_BELOW, Feature
from glowplug.plugins.sampling.torch_sampler_runtime import (
    CAPTURED,
    MIN_P,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TorchSampler,
)


class TritonSampler(TorchSampler):
    """Chooses in two to eighteen launches: the best token, up to eight for each cut-off, the draw."""

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        self._arrived = torch.zeros(limits.rows * limits.width, dtype=torch.int32, device=self._device)
        floats, ints = self._floats.device, self._ints.device
        self._parameters = kernel.RowParameters(floats[:, TEMPERATURE], floats[:, MIN_P], floats[:, TOP_P],
                                                ints[:, TOP_K], ints[:, SEED])
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile every pass now, so that the first request that wants a feature does not wait for it."""
        self._floats.device[0, TEMPERATURE] = 1.0
        self._floats.device[0, TOP_P] = 0.5
        self._ints.device[0, TOP_K] = 2
        none = torch.zeros(1, dtype=torch.int64, device=self._device)
        everything = Feature.RANDOM | Feature.TOP_K | Feature.TOP_P
        self._choose_for(everything, torch.zeros(1, self._vocab, device=self._device), none, none)
        self._floats.device.zero_()
        self._ints.device.zero_()

    def capture_key(self) -> str | None:
        return CAPTURED.get(self._step & ~Feature.MIN_P)  # which a draw looks at anyway

    def _choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._choose_for(self._step, logits, rows, positions)

    def _choose_for(self, features: Feature, logits: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        arrived = self._counters(len(logits))
        choice = kernel.best(logits, arrived)
        for feature, count in ((Feature.TOP_K, True), (Feature.TOP_P, False)):
            if features & feature:
                kernel.cut_off(logits, choice, rows, self._parameters, GREEDY_BELOW, count, arrived)
        if features & Feature.RANDOM:
            kernel.draw(logits, choice, rows, positions, self._parameters, GREEDY_BELOW, arrived)
        return choice.tokens, choice.bad

    def _counters(self, rows: int) -> Tensor:
        if len(self._arrived) < rows:
            self._arrived = torch.zeros(rows, dtype=torch.int32, device=self._device)
        return self._arrived
