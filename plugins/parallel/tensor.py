"""Tensor parallelism: every rank computes a slice of each layer; partial sums are all-reduced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.facts.layer_sizes import SplitDimension
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.splits import fitting_sizes, uneven
from glowplug.core.facts.weight_classes import KV_HEADS, TIED, VOCAB
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ParallelOffers, QuantizationOffers, SpeculativeOffers
from glowplug.core.plugin.options import ParallelOptions, QuantizationOptions

NAME = "tensor"
FIX_SIZES_MAX = 4  #: most sizes listed in a fix


class TensorOptions(ParallelOptions):
    use: Literal["tensor"] = "tensor"
    size: int = Field(1, ge=1, description="ranks that share each layer (--tp)")


def check_tensor(context: CheckContext) -> Iterator[Refusal]:
    """Refuse numbers of ranks that do not divide every split dimension of model and draft."""
    mesh = context.values.mesh
    if mesh.get("tp", 1) == 1:
        return
    # a model without a family is refused elsewhere
    if not context.facts.model.splits and context.chosen["model"]:
        yield Refusal(
            NAME,
            "parallel",
            "the model family declares no dimensions that ranks could split",
            "one rank, or a version of the plugin that declares ModelOffers.inventory",
        )
        return
    place = next(
        (
            i
            for i, chosen in enumerate(context.chosen["parallel"])
            if chosen.options is context.options
        ),
        0,
    )
    block = kept_block(context)
    refused: set[str] = set()
    for model in _split_models(context):
        try:
            found = uneven(model, mesh, block)
        except ValueError:
            # an axis does not divide the tensor ranks; the axis's own strategy refuses that
            return
        if found:
            fix = _fix(f"parallel.{place}.size", fitting_sizes(model, mesh, block), mesh)
            reasons = [_reason(split, mesh, block) for split in found]
            yield from (
                Refusal(NAME, f"parallel.{place}.size", reason, fix)
                for reason in reasons
                if reason not in refused
            )
            refused.update(reasons)


def _split_models(context: CheckContext) -> list[ModelFacts]:
    """Return the facts of the model and of its draft.

    A draft that is a whole model is left out: it is checked as a model of its own.
    """
    draft = context.facts.draft
    whole = any(chosen.offers.whole_model for chosen in context.of(SpeculativeOffers))
    return [context.facts.model] + ([] if draft is None or whole else [draft])


def kept_block(context: CheckContext) -> int:
    """Return the block size, in channels, of the chosen quantization on this device.

    Ranks may split quantised weights only at multiples of this size; it is 1 without blocks.
    """
    for scheme in context.chosen["quantization"]:
        offers = scheme.offers
        assert isinstance(offers, QuantizationOffers) and isinstance(
            scheme.options, QuantizationOptions
        )
        return scheme.options.split_block(context.values.device, offers, context.facts.model)
    return 1


def _reason(split: SplitDimension, mesh: dict[str, int], block: int) -> str:
    """Return the refusal's reason: why ``split`` cannot be divided over the mesh."""
    parts = split.parts(mesh)
    what = f"{split.layer}: {split.dimension} of {split.full}"
    if split.role in (VOCAB, TIED):
        return f"{what} leaves some of the {parts} ranks without vocabulary"
    if split.full % parts == 0 and split.quantized and block > 1:
        held = split.full // parts * split.unit
        return (
            f"{what} gives each of {parts} ranks {held} channels, which splits the "
            f"quantization's blocks of {block}"
        )
    if split.role == KV_HEADS:
        return f"{what} can be neither split evenly over {parts} ranks nor replicated on them"
    return f"{what} does not split over {parts} ranks"


def _fix(field: str, sizes: list[int], mesh: dict[str, int]) -> str:
    """Return the refusal's fix: the sizes for ``field`` that fit, or why none does."""
    if not sizes:
        others = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if axis != "tp")
        return f"no size up to {mesh['tp']} fits with {others}" if others else f"{field} = 1"
    more = ", ".join(map(str, sizes[1:FIX_SIZES_MAX]))
    return f"{field} = {sizes[0]}" + (f" (or {more})" if more else "")


@hookimpl
def register_parallel_strategies() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=TensorOptions,
            check=check_tensor,
            factory="glowplug.plugins.parallel.tensor_runtime:TensorParallel",
            offers=ParallelOffers(axes=frozenset({"tp"}), ranks=True, exchanges=False),
            summary="every layer split over the ranks: heads, widths and vocabulary",
        )
    ]
