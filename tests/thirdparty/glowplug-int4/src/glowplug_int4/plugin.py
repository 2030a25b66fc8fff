"""The declaration of the quantization scheme "int4_groups". It imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.api import (
    EVERY_MODE_EAGER,
    Component,
    OnlineWeight,
    QuantizationOffers,
    QuantizationOptions,
    hookimpl,
    weight_classes,
)


class Int4Options(QuantizationOptions):
    use: Literal["int4_groups"] = "int4_groups"
    group: int = Field(32, ge=2, multiple_of=2, description="inputs that share a scale")


def online_bytes(weight: OnlineWeight) -> float:
    """Return the bytes of a loaded weight: half a byte per element, and float16 scales.

    Experts, and weights whose inputs are not whole groups, are left alone.
    """
    elements = weight.rows * weight.columns
    group = weight.options.group
    if weight.role == weight_classes.EXPERTS or weight.columns % group:
        return elements * weight.element
    return elements / 2 + 2 * elements / group


@hookimpl
def register_quantization_schemes() -> list[Component]:
    offers = QuantizationOffers(
        reads=frozenset({"none"}),
        online=True,
        online_bytes=online_bytes,
        modes=dict(EVERY_MODE_EAGER),
        devices=frozenset({"cpu"}),
    )
    return [
        Component(
            name="int4_groups",
            options=Int4Options,
            factory="glowplug_int4.runtime:Int4Groups",
            offers=offers,
            contract=2,
            summary="int4 weights with a scale per group of inputs, quantised at load (CPU)",
        )
    ]
