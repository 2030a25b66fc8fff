"""A third party's scheme for checkpoints whose modules have codes of four or of eight bits."""

from __future__ import annotations

from typing import Literal

from glowplug.core.api import (
    EVERY_MODE_EAGER,
    Component,
    ModelFacts,
    QuantizationOffers,
    QuantizationOptions,
    StoredLeaf,
    StoredWeight,
    TensorFact,
    hookimpl,
)


class MixedOptions(QuantizationOptions):
    use: Literal["mixed"] = "mixed"


def bits_of(model: ModelFacts, module: str) -> int:
    """Return the bits of a module's codes: 8 if config.json lists a part of its path, else 4."""
    wide = model.config["quantization_config"]["wide"]
    return 8 if any(part in module for part in wide) else 4


def stored(weight: StoredWeight) -> dict[str, TensorFact]:
    columns = weight.columns * bits_of(weight.model, weight.module) // 8
    return {
        "codes": TensorFact("uint8", (weight.rows, columns)),
        "scales": TensorFact("float16", (weight.rows, 1)),
    }


def leaves(model: ModelFacts, module: str) -> tuple[StoredLeaf, ...]:
    bits = bits_of(model, module)
    return (
        StoredLeaf("codes", kept=bits / 8, packed=8 // bits),
        StoredLeaf("scales", kept=2, scale=True),
    )


@hookimpl
def register_quantization_schemes() -> list[Component]:
    return [
        Component(
            name="mixed",
            options=MixedOptions,
            factory="tests.plugins.mixed_runtime:Mixed",
            offers=QuantizationOffers(
                reads=frozenset({"mixed"}),
                stored=stored,
                leaves=leaves,
                modes=dict(EVERY_MODE_EAGER),
                devices=frozenset({"cpu"}),
            ),
            contract=2,
        )
    ]
