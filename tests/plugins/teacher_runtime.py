"""The runtime of the plugin for comparing logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.engine.runner import Runner
from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Limits, MlaLayer, QuantizationScheme, Sampled, Worker
from glowplug.core.step.request import SamplingParams
from glowplug.plugins.attention.mla.torch_runtime import TorchMla
from glowplug.plugins.quantization.block_fp8.cpu import BlockFp8
from glowplug.plugins.quantization.none_runtime import NoQuantization
from glowplug.plugins.sampling.torch_sampler_runtime import TorchSampler
from tests.plugins.teacher import (
    KeeperOptions,
    PlainTorchOptions,
    RoundedMlaOptions,
    TeacherOptions,
    rounded_entries,
)

#: logits by (number of the sequence, position of the token they predict), on the device, in the
#: order of computation
SEEN: dict[tuple[int, int], Tensor] = {}
#: the whole sequences: a request's seed is the number of its sequence. Without any, no token is
#: given and no logits are kept
SCRIPTS: list[list[int]] = []


class Teacher(TorchSampler):
    """A sampler that copies the logits of every step, captured or not."""

    def __init__(self, options: TeacherOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._numbers: dict[int, int] = {}

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        self._scripts = torch.zeros(
            limits.rows, limits.context + 1, dtype=torch.int64, device=self._device
        )

    def join(
        self,
        row: int,
        params: SamplingParams,
        tokens: NDArray[np.int32],
        prompt_len: int,
        stop_ids: frozenset[int],
    ) -> None:
        super().join(row, params, tokens, prompt_len, stop_ids)
        if SCRIPTS:
            assert params.seed is not None
            self._numbers[row] = params.seed
            script = torch.tensor(SCRIPTS[params.seed])
            self._scripts[row, : len(script)] = script.to(self._device)

    def capture_key(self) -> None:
        return None

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
    ) -> Sampled:
        if not SCRIPTS:
            return super().sample(logits, rows, positions, ahead)
        for line, row, position in zip(logits, rows.tolist(), positions.tolist()):
            if row in self._numbers:  # not a padding row of a captured step
                SEEN[self._numbers[row], position] = line.float().clone()
        return replace(
            super().sample(logits, rows, positions, ahead), tokens=self._scripts[rows, positions]
        )


def keeper(options: KeeperOptions, plan: EnginePlan, worker: Worker) -> TorchSampler:
    if torch.device(worker.device).type == "cpu":
        return _kept_by(TorchSampler)(options, plan, worker)
    from glowplug.plugins.sampling.triton_sampler_runtime import TritonSampler

    return _kept_by(TritonSampler)(options, plan, worker)


def _kept_by(base: type[TorchSampler]) -> type[TorchSampler]:
    class Keeper(base):  # type: ignore[valid-type,misc]
        """Keeps logits in ``kept``: float32 [rows, count + 1, V], the last entry of each row being
        for positions outside the window.
        """

        def __init__(self, options: KeeperOptions, plan: EnginePlan, worker: Worker) -> None:
            super().__init__(options, plan, worker)
            self._first, self._count = options.first, options.count

        def reserve(self, limits: Limits) -> None:
            self.kept = torch.zeros(limits.rows, self._count + 1, limits.vocab, device=self._device)
            super().reserve(limits)

        def sample(
            self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
        ) -> Sampled:
            at = positions - self._first
            at = torch.where((at >= 0) & (at < self._count), at, self._count)
            self.kept[rows, at] = logits.float()
            return super().sample(logits, rows, positions, ahead)

    return Keeper


def score_prompts(runner: Runner) -> None:
    """Keep logits of scored prompts as well from now on."""

    def score(hidden: Tensor, targets: NDArray[np.int32], row: int, start: int, k: int):  # type: ignore[no-untyped-def]
        sequence = runner.table.sequences[row]
        assert sequence is not None
        number = sequence.params.seed
        assert number is not None
        for offset, line in enumerate(runner.model.logits(hidden)):
            SEEN[number, start + offset] = line.float().clone()
        return plain(hidden, targets, row, start, k)

    plain, runner._score = runner._score, score  # type: ignore[method-assign]


class _Torch(NoQuantization):
    """Dense weights without kernels of our own."""

    def __init__(self, options: PlainTorchOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)  # type: ignore[arg-type]
        self._on_cuda = self.fused_shared = False


def plain_torch(options: PlainTorchOptions, plan: EnginePlan, worker: Worker) -> QuantizationScheme:
    if plan.facts.model.quant_method != "fp8":
        return _Torch(options, plan, worker)
    made = BlockFp8(options, plan, worker)
    made._in_triton = False
    return made


KEPT = torch.float16


class RoundedMla(TorchMla):
    """Attention in which later tokens read values rounded to the other format, kept in float16,
    which holds them exactly; a prompt's own tokens read each other unrounded, as in backends for
    GPUs. A pool in another dtype is not rounded.
    """

    def __init__(self, options: RoundedMlaOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._to: torch.dtype = getattr(torch, options.to)
        self._row_keys = 0  # every row goes through the groups, which store first

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        out = super().mla(q_nope, q_rope, latent, k_rope, layer)
        assert self._kv_slots is not None
        for pool, fresh in (
            (self._kv[layer.index]["latent"], latent),
            (self._kv[layer.index]["rope"], k_rope),
        ):
            if pool.dtype is KEPT:
                pool[self._kv_slots] = fresh.to(self._to).to(KEPT)
        return out

    def kv_layout(self) -> KVLayout:
        return self._plan.kv_layout(rounded_entries)
