"""Data-parallel attention: groups of ranks attend for requests of their own, and share the MLPs."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.component import CheckContext, Component
from glowplug.core.errors import Refusal
from glowplug.core.hookspecs import hookimpl
from glowplug.core.offers import ParallelOffers
from glowplug.core.options import ParallelOptions

NAME = "dp_attention"
FIELD = "parallel"


class DpAttentionOptions(ParallelOptions):
    use: Literal["dp_attention"] = "dp_attention"
    size: int = Field(1, ge=1, description="groups of ranks, each with its own requests, scheduler and KV cache; the "
                                           "tensor ranks are dealt to them evenly")


def check_dp_attention(context: CheckContext) -> Iterator[Refusal]:
    """Groups are cut from the tensor ranks, which a strategy listed before must define."""
    groups, ranks = context.options.size, context.values["mesh"].get("tp", 1)
    if not _tensor_ranks_before(context):
        yield Refusal(NAME, FIELD, "data-parallel attention deals tensor ranks to its groups, and no strategy listed "
                      "before it defines any", f'[[parallel]] use = "tensor", size = {max(2, groups)} before it')
        return
    if ranks == 1:
        yield Refusal(NAME, FIELD, "data-parallel attention deals tensor ranks to its groups, and there is one rank",
                      f"more tensor ranks (size = {max(2, groups)}), or leave {NAME} out")
    elif ranks % groups:
        fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
        yield Refusal(NAME, FIELD, f"{groups} groups do not share {ranks} tensor ranks evenly",
                      f"size = {_nearest(fits, groups)} (one of {_listed(fits)})")
    else:
        yield from _check_heads(context, groups, ranks)


def _tensor_ranks_before(context: CheckContext) -> bool:
    for chosen in context.chosen["parallel"]:
        if chosen.options is context.options:
            return False
        if isinstance(chosen.offers, ParallelOffers) and "tp" in chosen.offers.axes:
            return True
    return False


def _check_heads(context: CheckContext, groups: int, ranks: int) -> Iterator[Refusal]:
    """The heads of a group's attention are dealt to its ranks, key heads too where each has a cache of its own."""
    model = context.facts.model
    counts = {"attention heads": model.num_heads}
    if model.kind != "mla":
        counts["key-value heads"] = model.num_kv_heads
    split = ranks // groups
    for what, count in counts.items():
        if count % split:
            fits = [size for size in range(1, ranks + 1)
                    if ranks % size == 0 and not any(other % (ranks // size) for other in counts.values())]
            yield Refusal(NAME, FIELD, f"{count} {what} do not split over the {split} ranks of a group ({ranks} tensor "
                          f"ranks in {groups} groups)", f"size = {_nearest(fits, groups)} (one of {_listed(fits)})")
            return


def _nearest(sizes: list[int], wanted: int) -> int:
    return min(sizes, key=lambda size: (abs(size - wanted), -size))


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


@hookimpl
def register_parallel_strategies() -> list[Component]:
    return [Component(
        name=NAME,
        options=DpAttentionOptions,
        factory="glowplug.plugins.parallel.dp_attention_runtime:DpAttention",
        offers=ParallelOffers(axes=frozenset({"dp"}), ranks=True, idle_steps=True, static_shapes=True),
        check=check_dp_attention,
        summary="groups of ranks with requests and KV cache of their own; MLPs over all ranks",
    )]
