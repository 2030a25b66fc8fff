"""The runtime of the ``random`` weight source: each tensor is a function of (seed, name, shape).

Scales keep hidden states and logits near one and spread routing over the experts; zero or constant weights would make
every token choose the same experts and hide most mistakes.
"""
from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from glowplug.core.facts import ModelFacts, TensorFact
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import WeightTarget, Worker
from glowplug.plugins.weights.random import RandomOptions

FP8_SPREAD = 96.0  #: standard deviation of FP8 codes: the format's 448 lies 4.7 deviations out
BLOCK = 128


class RandomSource:
    """Makes whatever is asked for, in the dtype a published checkpoint of these facts would hold."""

    def __init__(self, options: RandomOptions, plan: EnginePlan, worker: Worker) -> None:
        self._seed = plan.seed if options.seed is None else options.seed
        self._dtype = torch.float32
        self._tied = False
        self._layers = 1
        self._block = (BLOCK, BLOCK)

    def open(self, facts: ModelFacts) -> None:
        dtype = getattr(torch, facts.dtype, None)
        self._dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
        self._tied = bool(facts.config.get("tie_word_embeddings"))
        self._layers = max(1, facts.num_layers)
        self._block = facts.quant_block or self._block

    def entries(self) -> Mapping[str, TensorFact]:
        return {}

    def read(self, target: WeightTarget) -> Tensor:
        return self._make(target.name, tuple(target.shape), target.dtype)[target.index]

    def close(self) -> None:
        pass

    def _make(self, name: str, shape: tuple[int, ...], dtype: str | None) -> Tensor:
        noise = torch.randn(shape, generator=self._generator(name))
        if name.endswith(".weight_scale_inv"):
            # NOTE: codes spread FP8_SPREAD wide, so this gives the weight its fan-in scale; blocks differ on purpose.
            width = self._deviation(name, shape[-1] * self._block[1])
            return noise.mul_(0.1).clamp_(-0.3, 0.3).add_(1.0).mul_(width / FP8_SPREAD)
        if dtype == "float8_e4m3fn":
            return noise.mul_(FP8_SPREAD).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
        if name.endswith("e_score_correction_bias"):
            return noise.mul_(0.05)
        if len(shape) == 1:
            vector = noise.mul_(0.1).add_(1.0) if name.endswith(".weight") else noise.mul_(0.05)
            return self._cast(vector, dtype)
        return self._cast(noise.mul_(self._deviation(name, shape[-1])), dtype)

    def _deviation(self, name: str, inputs: int) -> float:
        """Fan-in scale; embeddings of one unless tied; what writes to the residual stream shrinks with depth."""
        if "embed_tokens" in name and not self._tied:
            return 1.0
        if ".o_proj." in name or ".down_proj." in name:
            return float((2 * self._layers * inputs) ** -0.5)
        return float(inputs**-0.5)

    def _cast(self, value: Tensor, dtype: str | None) -> Tensor:
        return value.to(getattr(torch, dtype) if dtype else self._dtype)

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
