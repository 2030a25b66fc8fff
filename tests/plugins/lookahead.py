"""A third party's speculative algorithm whose draft has several layers in the target's KV pool.

The layers run behind those of the target, over the same tokens. They read the target's final hidden
states and those after two chosen layers, and predict the token after the next one. Their weights
are in a folder of an architecture of its own.
"""

from __future__ import annotations

from typing import Any, Literal

from glowplug.core.api import (
    Component,
    DraftShape,
    Inventory,
    ModelFacts,
    ModelOffers,
    Options,
    SpeculativeOffers,
    SpeculativeOptions,
    TensorSpec,
    decoder_tensors,
    hookimpl,
    token_drafts_bytes,
    weight_classes,
)

ARCHITECTURE = "LookaheadLayers"
FEATURES = (1, 2)  #: layers of the target after which hidden states are read


class LookaheadOptions(SpeculativeOptions):
    use: Literal["lookahead"] = "lookahead"
    draft_model: str

    def width(self) -> int:
        return 2

    def draft_shape(self) -> DraftShape:
        return DraftShape.chain(1)

    def lookahead(self) -> int:
        return 0  # the layers write at the positions of the step's tokens only

    def draft_folder(self) -> str | None:
        return self.draft_model

    def draft_layers(self, draft: ModelFacts) -> int:
        return draft.num_layers

    def features(self, draft: ModelFacts) -> int:
        return len(FEATURES)


class LayersOptions(Options):
    use: str = "auto"


def inventory(model: ModelFacts) -> Inventory:
    """Return the tensors of a folder: its layers, ``fc`` and a norm."""
    layers = range(model.num_layers)
    hidden = model.hidden_size
    inputs = (1 + len(FEATURES)) * hidden
    tensors = (
        TensorSpec("fc.weight", weight_classes.WHOLE, hidden, inputs),
        TensorSpec("norm.weight", weight_classes.WHOLE, hidden),
        *decoder_tensors.norms(model, layers),
        *decoder_tensors.grouped_attention(model, layers),
        *decoder_tensors.dense_mlp(model, layers),
    )
    whole = decoder_tensors.decoder_inventory(model, ())
    return Inventory(tensors, whole.sizes)


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="lookahead",
            options=LookaheadOptions,
            factory="tests.plugins.lookahead_runtime:Lookahead",
            offers=SpeculativeOffers(drafts=True, simulates=True, reserves=token_drafts_bytes),
            contract=2,
            summary="drafts one token by several layers that continue the target's",
        )
    ]


@hookimpl
def register_models() -> list[Component]:
    return [
        Component(
            name="lookahead_layers",
            options=LayersOptions,
            factory="tests.plugins.lookahead_runtime:no_model",
            offers=ModelOffers(architectures=frozenset({ARCHITECTURE}), inventory=inventory),
            contract=2,
            summary="folders of layers for the speculative algorithm lookahead",
        )
    ]


def config_of(target: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the config.json of a folder of ``layers`` layers for a Llama target."""
    return {**target, "architectures": [ARCHITECTURE], "num_hidden_layers": layers}
