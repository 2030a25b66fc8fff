"""Data-parallel attention: each group of ranks attends for its own requests; MLPs use all ranks."""

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
        "tensor ranks are divided evenly among them",
    )


def check_dp_attention(context: CheckContext) -> Iterator[Refusal]:
    """Refuse a number of groups that does not divide the number of tensor-parallel ranks.

    The tensor-parallel ranks must be defined by a strategy listed before this one. That strategy
    checks whether heads and vocabulary can be split over the ranks of a group.
    """
    held = context.of(ParallelOffers)
    place = next((at for at, chosen in enumerate(held) if chosen.options is context.options), 0)
    field = f"parallel.{place}.size"
    groups = context.options.size
    ranks = context.values.mesh.get("tp", 1)
    if not any("tp" in before.offers.axes for before in held[:place]):
        yield Refusal(
            NAME,
            f"parallel.{place}.use",
            "data-parallel attention divides the tensor ranks into groups, and no strategy listed "
            "before it defines tensor ranks",
            f'[[parallel]] use = "tensor", size = {max(2, groups)} before it',
        )
    elif ranks == 1:
        yield Refusal(
            NAME,
            field,
            "data-parallel attention divides the tensor ranks into groups, and there is only one "
            "rank",
            f"more tensor ranks (size = {max(2, groups)}), or leave {NAME} out",
        )
    elif ranks % groups:
        fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
        yield Refusal(
            NAME,
            field,
            f"{ranks} tensor ranks cannot be divided evenly among {groups} groups",
            _instead(fits, groups),
        )


def _instead(sizes: list[int], wanted: int) -> str:
    """Return the refusal's fix: the size nearest to ``wanted``, and all allowed ``sizes``."""
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
            summary="groups of ranks with their own requests and KV cache; MLPs over all ranks",
        )
    ]
