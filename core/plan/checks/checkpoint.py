"""Checks of model family, weight source and quantization against the checkpoint. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.checks.rules import instead, listed, reads, refuse
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.component import ChosenOf, Options
from glowplug.core.plugin.offers import QuantizationOffers, WeightOffers


@reads("model")
def check_architecture(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a model family that does not build the model's architecture."""
    chosen = proposal.model
    if chosen is None:
        return
    offers = chosen.offers
    heads = offers.eagle_architectures if proposal.drafts else frozenset()
    if proposal.facts.model.architecture not in offers.architectures | heads:
        yield refuse(
            proposal,
            "model",
            chosen,
            f"{chosen.name} builds {listed(chosen.offers.architectures)}, the "
            f"model is {proposal.facts.model.architecture}",
            "a model of one of these architectures, or a plugin that registers this one",
        )


@reads("weights")
def check_weight_format(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a weight source for another file format, and made-up weights without a request."""
    chosen = proposal.weights
    found = proposal.facts.model.format
    if chosen is None:
        return
    formats = chosen.offers.formats
    if "synthetic" in formats:
        if proposal.source("weights.use") is None:
            yield refuse(
                proposal,
                "weights",
                chosen,
                f"{chosen.name} makes up weights, which must be requested",
                _with_weights(proposal, f'weights.use = "{chosen.name}"'),
            )
    elif found not in formats:
        fix = instead(
            proposal,
            "weights",
            lambda o: found in o.formats or "synthetic" in o.formats,
            "a folder with weights, or a plugin that reads them",
        )
        if found == "none" and "use =" in fix:
            fix = _with_weights(proposal, fix)
        held = "no weights" if found == "none" else f"{found} weights"
        yield refuse(
            proposal,
            "weights",
            chosen,
            f"{chosen.name} reads {listed(formats)}; {proposal.facts.model.path} holds {held}",
            fix,
        )


def _with_weights(proposal: Proposal, made_up: str) -> str:
    """Return the fix for a folder without weights.

    Args:
        made_up: the setting that selects made-up weights.
    """
    offered = (found.component.offers for found in proposal.plugins.components("weights"))
    formats = {
        name for offers in offered if isinstance(offers, WeightOffers) for name in offers.formats
    }
    return (
        f"a folder with weights ({listed(formats - {'synthetic'})}), or {made_up} for made-up ones"
    )


@reads("quantization")
def check_quantization(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a scheme that cannot load the checkpoint's quantization or its block shape."""
    chosen = proposal.quantization
    model = proposal.facts.model
    if chosen is None:
        return
    offers = chosen.offers
    method = model.quant_method
    if method not in offers.reads and method != "none":
        yield _unread(proposal, chosen)
    elif method not in offers.reads and not offers.online:
        yield refuse(
            proposal,
            "quantization",
            chosen,
            f"{chosen.name} reads checkpoints quantized as "
            f"{listed(offers.reads)}; this one is not quantized",
            instead(
                proposal, "quantization", lambda o: "none" in o.reads, 'quantization.use = "auto"'
            ),
        )
    elif (
        method != "none"
        and offers.block_shape
        and model.quant_block
        and offers.block_shape != model.quant_block
    ):
        yield refuse(
            proposal,
            "quantization",
            chosen,
            f"{chosen.name} reads blocks of {_shape(offers.block_shape)}, the "
            f"checkpoint has {_shape(model.quant_block)}",
            "a plugin that reads these blocks",
        )


def _unread(proposal: Proposal, chosen: ChosenOf[QuantizationOffers, Options]) -> Refusal:
    """Return the refusal of a scheme that does not read the checkpoint's quantization."""
    model = proposal.facts.model
    offers = chosen.offers
    native = instead(
        proposal,
        "quantization",
        lambda o: model.quant_method in o.reads,
        "a plugin that reads it",
    )
    plain = "none" in offers.reads and not offers.online
    reason = f"{chosen.name} reads unquantized checkpoints, this one is {quantized_as(model)}"
    return refuse(
        proposal,
        "quantization",
        chosen,
        reason if plain else stacking(proposal, chosen.name),
        f"leave quantization out ({native} is then chosen)" if "use =" in native else native,
    )


def stacking(proposal: Proposal, name: str) -> str:
    """Return why the scheme ``name`` cannot be applied to an already quantized checkpoint."""
    return (
        f"the checkpoint is already quantized ({quantized_as(proposal.facts.model)}); "
        f"{name} would quantize it a second time"
    )


def quantized_as(model: ModelFacts) -> str:
    """Return a checkpoint's quantization method and block shape as text."""
    return model.quant_method + (
        f" in {_shape(model.quant_block)} blocks" if model.quant_block else ""
    )


def _shape(block: tuple[int, int]) -> str:
    return f"{block[0]}x{block[1]}"
