"""Data-parallel attention: groups of ranks attend for requests of their own, and share the MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ParallelOffers
from glowplug.core.plugin.options import ParallelOptions

NAME = "dp_attention"


class DpAttentionOptions(ParallelOptions):
    use: Literal["dp_attention"] = "dp_attention"
    size: int = Field(
        1,
        ge=1,
        description="groups of ranks, each with its own requests, scheduler and KV cache; the "
        "tensor ranks are dealt to them evenly",
    )


def check_dp_attention(context: CheckContext) -> Iterator[Refusal]:
    """Groups are cut from the tensor ranks, which a strategy listed before must define.

    Whether heads and vocabulary split over the ranks of a group is that strategy's to say.
    """
    held = context.chosen["parallel"]
    place = next((at for at, chosen in enumerate(held) if chosen.options is context.options), 0)
    field = f"parallel.{place}.size"
    groups = context.options.size
    ranks = context.values["mesh"].get("tp", 1)
    if not any(
        isinstance(before.offers, ParallelOffers) and "tp" in before.offers.axes
        for before in held[:place]
    ):
        yield Refusal(
            NAME,
            f"parallel.{place}.use",
            "data-parallel attention deals tensor ranks to its groups, and no "
            "strategy listed before it defines any",
            f'[[parallel]] use = "tensor", size = {max(2, groups)} before it',
        )
    elif ranks == 1:
        yield Refusal(
            NAME,
            field,
            "data-parallel attention deals tensor ranks to its groups, and there is one rank",
            f"more tensor ranks (size = {max(2, groups)}), or leave {NAME} out",
        )
    elif ranks % groups:
        fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
        yield Refusal(
            NAME,
            field,
            f"{groups} groups do not share {ranks} tensor ranks evenly",
            _instead(fits, groups),
        )


def _instead(sizes: list[int], wanted: int) -> str:
    nearest = min(sizes, key=lambda size: (abs(size - wanted), -size))
    return f"size = {nearest} (one of {', '.join(map(str, sizes))})"


@hookimpl
def register_parallel_strategies() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=DpAttentionOptions,
            factory="glowplug.plugins.parallel.dp_attention_runtime:DpAttention",
            offers=ParallelOffers(axes=frozenset({"dp"}), ranks=True, idle_steps=True),
            check=check_dp_attention,
            summary="groups of ranks with requests and KV cache of their own; MLPs over all ranks",
        )
    ]
