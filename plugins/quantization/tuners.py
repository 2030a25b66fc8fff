"""Tuners of the products in Triton: routed experts, and block FP8."""
from __future__ import annotations

from glowplug.core.hookspecs import hookimpl
from glowplug.core.tuning import Tuner


@hookimpl
def tuners() -> list[Tuner]:
    return [Tuner("moe", "glowplug.plugins.quantization.tune_moe:MoeTuner",
                  "tiles of the routed experts' products over dense weights")]
