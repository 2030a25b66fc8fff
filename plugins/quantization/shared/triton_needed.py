"""What products by this project's Triton kernels need of a machine, for the schemes that keep
quantized weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Package
from glowplug.core.plugin.requirements import installation, unmet
from glowplug.kernels.launch.cards import LIBRARIES, TILES

TRITON = Package("triton", ">=3.5")


def check_triton(context: CheckContext, name: str, otherwise: str) -> Iterator[Refusal]:
    """On CUDA: a card that the kernels are made for, and Triton. ``otherwise``: the option that
    does without them, by keeping weights in the compute dtype."""
    named = [
        option
        for option in context.options.provider_fields()
        if getattr(context.options, option) != "auto"
    ]
    settings = " and ".join(
        f"quantization.{one}" for one in (otherwise, *(f'{option} = "auto"' for option in named))
    )
    without = (
        f'quantization.use = "{name}" with {settings}, which keeps weights in the compute dtype'
    )
    machine = context.facts.hardware
    cards = sorted({card.compute for card in machine.devices} - TILES)
    if context.values["device"] != "cuda":
        return
    if cards:
        yield Refusal(
            name,
            "quantization.use",
            f"{name} multiplies by kernels made for SM"
            f"{', '.join(map(str, sorted(TILES)))}; {machine.name} has SM{', '.join(map(str, cards))}",
            without,
        )
    found = unmet(TRITON, context.facts.software.packages)
    if found:
        needed = TRITON.name + TRITON.spec
        yield Refusal(
            name,
            "quantization.use",
            f"{name} multiplies by kernels in Triton, and needs {needed} ({found})",
            f"{installation(needed, machine)}, or {without}",
        )


def check_libraries(context: CheckContext, name: str) -> Iterator[Refusal]:
    """Other libraries that an option names to multiply in 8 bits, on a card for our own kernels
    that is none for them.
    """
    machine = context.facts.hardware
    cards = {card.compute for card in machine.devices}
    others = cards - LIBRARIES
    if context.values["device"] != "cuda" or not others or not cards <= TILES:
        return
    for option in context.options.provider_fields():
        value = getattr(context.options, option)
        if value not in ("auto", "triton"):
            yield Refusal(
                name,
                f"quantization.{option}",
                f"{value} is called on SM{', '.join(map(str, LIBRARIES))}; "
                f"{machine.name} has SM{', '.join(map(str, sorted(others)))}",
                f'quantization.{option} = "auto"',
            )
