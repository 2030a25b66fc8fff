"""The runtime of the plugin with faults."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import MlaLayer, QuantizationScheme, Worker
from glowplug.core.step.batch import Batch
from glowplug.plugins.attention.mla.torch_runtime import TorchMla
from glowplug.plugins.quantization.block_fp8.cpu import BlockFp8
from glowplug.plugins.quantization.none_runtime import NoQuantization
from tests.plugins.faulty import FaultyDecodeOptions, FaultyWeightOptions

FACTOR = 1.25  #: wrong factor of a damaged weight or result


def faulty_weight(
    options: FaultyWeightOptions, plan: EnginePlan, worker: Worker
) -> QuantizationScheme:
    native = plan.facts.model.quant_method == "fp8"
    made: Any = (BlockFp8 if native else NoQuantization)(options, plan, worker)  # type: ignore[arg-type]
    plain = made.linear

    def linear(shape: Any) -> Any:
        method = plain(shape)
        if shape.name == options.module:
            finalize = method.finalize

            def damaged() -> None:
                finalize()
                weight = method.weight
                weight.copy_(
                    weight.t().clone() if options.fault == "transpose" else weight * FACTOR
                )

            method.finalize = damaged
        return method

    made.linear = linear
    return made  # type: ignore[no-any-return]


class FaultyDecode(TorchMla):
    """``torch_mla`` whose result has a wrong scale in one layer's decode steps."""

    def __init__(self, options: FaultyDecodeOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._wrong = options.layer
        self._decodes = False

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        self._decodes = batch.mode is Mode.DECODE
        super().plan_step(batch, graph)

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        found = super().mla(q_nope, q_rope, latent, k_rope, layer)
        return found * FACTOR if self._decodes and layer.index == self._wrong else found
