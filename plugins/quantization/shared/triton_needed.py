"""Checks that a machine supports the GPU kernels of schemes that keep quantized weights."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Package
from glowplug.core.plugin.requirements import installation, unmet
from glowplug.kernels.launch.cards import LIBRARIES, TILES

TRITON = Package("triton", ">=3.5")


def check_triton(context: CheckContext, name: str, alternative: str) -> Iterator[Refusal]:
    """Refuse CUDA devices that our Triton kernels do not support, and machines without Triton.

    Args:
        context: the plan under construction.
        name: name of the quantization scheme.
        alternative: option setting that needs none of these kernels, because weights stay in
            the compute dtype.
    """
    if context.values.device != "cuda":
        return
    without = _without(context, name, alternative)
    machine = context.facts.hardware
    cards = sorted({card.compute for card in machine.devices} - TILES)
    if cards:
        yield Refusal(
            name,
            "quantization.use",
            f"{name} needs kernels written for SM{', '.join(map(str, sorted(TILES)))}; "
            f"{machine.name} has SM{', '.join(map(str, cards))}",
            without,
        )
    found = unmet(TRITON, context.facts.software.packages)
    if found:
        needed = TRITON.name + TRITON.spec
        yield Refusal(
            name,
            "quantization.use",
            f"{name} runs Triton kernels, which need {needed} ({found})",
            f"{installation(needed, machine)}, or {without}",
        )


def _without(context: CheckContext, name: str, alternative: str) -> str:
    """Return a fix for the refusal: settings with which the scheme needs none of our kernels.

    They are ``alternative``, and "auto" for each provider option that the configuration sets to
    another value. ``name``: name of the scheme.
    """
    settings = [alternative]
    for option in context.options.provider_fields():
        if getattr(context.options, option) != "auto":
            settings.append(f'{option} = "auto"')
    joined = " and ".join(f"quantization.{setting}" for setting in settings)
    return f'quantization.use = "{name}" with {joined}, which keeps weights in the compute dtype'


def check_libraries(context: CheckContext, name: str) -> Iterator[Refusal]:
    """Refuse GEMM libraries that the configuration names, on GPUs where only our own kernels run.

    ``name``: name of the 8-bit quantization scheme, for the refusal.
    """
    machine = context.facts.hardware
    cards = {card.compute for card in machine.devices}
    others = cards - LIBRARIES
    if context.values.device != "cuda" or not others or not cards <= TILES:
        return
    for option in context.options.provider_fields():
        value = getattr(context.options, option)
        if value not in ("auto", "triton"):
            yield Refusal(
                name,
                f"quantization.{option}",
                f"{value} is used only on SM{', '.join(map(str, LIBRARIES))}; "
                f"{machine.name} has SM{', '.join(map(str, sorted(others)))}",
                f'quantization.{option} = "auto"',
            )
