"""Tuners of GEMMs: routed experts, block FP8, int8 and int4."""

from __future__ import annotations

from glowplug.core.plugin.component import Tuner
from glowplug.core.plugin.hookspecs import hookimpl


@hookimpl
def tuners() -> list[Tuner]:
    return [
        Tuner(
            "moe",
            "glowplug.plugins.quantization.tuning.dense_experts:MoeTuner",
            "tile sizes of the routed experts' GEMMs over dense weights",
            "cuda",
        ),
        Tuner(
            "fp8-gemm",
            "glowplug.plugins.quantization.tuning.fp8:Fp8GemmTuner",
            "configurations and fastest GEMM provider of linear layers in block FP8",
            "cuda",
        ),
        Tuner(
            "fp8-moe",
            "glowplug.plugins.quantization.tuning.fp8_experts:Fp8ExpertsTuner",
            "tile sizes of the routed experts' GEMMs in block FP8",
            "cuda",
        ),
        Tuner(
            "int8-gemm",
            "glowplug.plugins.quantization.tuning.narrow:Int8GemmTuner",
            "fastest GEMM provider for each linear layer in int8",
            "cuda",
        ),
        Tuner(
            "awq-gemm",
            "glowplug.plugins.quantization.tuning.narrow:AwqGemmTuner",
            "fastest GEMM provider for each linear layer in AWQ's int4",
            "cuda",
        ),
    ]
