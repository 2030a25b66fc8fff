"""Tuners of the products in Triton: routed experts, block FP8, int8 and int4."""

from __future__ import annotations

from glowplug.core.plugin.component import Tuner
from glowplug.core.plugin.hookspecs import hookimpl


@hookimpl
def tuners() -> list[Tuner]:
    return [
        Tuner(
            "moe",
            "glowplug.plugins.quantization.tuning.dense_experts:MoeTuner",
            "tiles of the routed experts' products over dense weights",
            "cuda",
        ),
        Tuner(
            "fp8-gemm",
            "glowplug.plugins.quantization.tuning.fp8:Fp8GemmTuner",
            "configurations of linear layers in block FP8, and which library is faster",
            "cuda",
        ),
        Tuner(
            "fp8-moe",
            "glowplug.plugins.quantization.tuning.fp8_experts:Fp8ExpertsTuner",
            "tiles of the routed experts' products in block FP8",
            "cuda",
        ),
        Tuner(
            "int8-gemm",
            "glowplug.plugins.quantization.tuning.narrow:Int8GemmTuner",
            "which product is faster for each linear layer in int8",
            "cuda",
        ),
        Tuner(
            "awq-gemm",
            "glowplug.plugins.quantization.tuning.narrow:AwqGemmTuner",
            "which product is faster for each linear layer in AWQ's int4",
            "cuda",
        ),
    ]
