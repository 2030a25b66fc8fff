"""Tensor parallelism: every rank computes a slice of each layer, and the slices are added up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.facts.splits import Split, fitting_sizes, uneven
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ParallelOffers, QuantizationOffers
from glowplug.core.plugin.options import ParallelOptions, QuantizationOptions

NAME = "tensor"
SHOWN = 4  #: sizes listed in a fix


class TensorOptions(ParallelOptions):
    use: Literal["tensor"] = "tensor"
    size: int = Field(1, ge=1, description="ranks that share each layer (--tp)")


def check_tensor(context: CheckContext) -> Iterator[Refusal]:
    """Every split dimension of the model, and of its draft, divides."""
    mesh = context.values["mesh"]
    if mesh.get("tp", 1) == 1:
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
    said: set[str] = set()
    for model in (context.facts.model, context.facts.draft):
        if model is None:
            continue
        try:
            found = uneven(model, mesh, block)
        except (
            ValueError
        ):  # an axis that does not divide the tensor ranks: its own strategy says so
            return
        if found:
            fix = _fix(f"parallel.{place}.size", fitting_sizes(model, mesh, block), mesh)
            reasons = [_reason(split, mesh, block) for split in found]
            yield from (
                Refusal(NAME, f"parallel.{place}.size", reason, fix)
                for reason in reasons
                if reason not in said
            )
            said.update(reasons)


def kept_block(context: CheckContext) -> int:
    """The block that the chosen quantization keeps its weights in on this device; 1 where it has
    none.
    """
    for scheme in context.chosen["quantization"]:
        offers = scheme.offers
        assert isinstance(offers, QuantizationOffers) and isinstance(
            scheme.options, QuantizationOptions
        )
        return scheme.options.split_block(context.values["device"], offers, context.facts.model)
    return 1


def _reason(split: Split, mesh: dict[str, int], block: int) -> str:
    parts = split.parts(mesh)
    what = f"{split.layer}: {split.dimension} of {split.full}"
    if split.role == "vocab":
        return f"{what} leaves some of {parts} ranks without a token"
    if split.full % parts == 0 and split.quantized and block > 1:
        held = split.full // parts * split.unit
        return f"{what} gives each of {parts} ranks {held} channels, which cuts the quantization's blocks of {block}"
    if split.role == "kv_heads":
        return f"{what} can be neither dealt to {parts} ranks nor repeated on them evenly"
    return f"{what} does not split over {parts} ranks"


def _fix(field: str, sizes: list[int], mesh: dict[str, int]) -> str:
    if not sizes:
        others = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if axis != "tp")
        return (
            f"no size up to {mesh['tp']} fits together with {others}" if others else f"{field} = 1"
        )
    more = ", ".join(map(str, sizes[1:SHOWN]))
    return f"{field} = {sizes[0]}" + (f" (or {more})" if more else "")


@hookimpl
def register_parallel_strategies() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=TensorOptions,
            check=check_tensor,
            factory="glowplug.plugins.parallel.tensor_runtime:TensorParallel",
            offers=ParallelOffers(axes=frozenset({"tp"}), ranks=True),
            summary="ranks share every layer: heads, widths and vocabulary",
        )
    ]
