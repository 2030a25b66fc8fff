"""Expert parallelism: each rank holds a share of the routed experts.

Tokens are sent to the ranks of their experts, and the results are sent back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import OPERATIONAL, CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import GraphOffers, ParallelOffers
from glowplug.core.plugin.options import ParallelOptions

NAME = "ep_moe"


class EpMoeOptions(ParallelOptions):
    use: Literal["ep_moe"] = "ep_moe"
    size: int = Field(
        1,
        ge=1,
        description="number of shares into which the experts are divided; it divides the tensor "
        "ranks, and the ranks of one share split the width of their experts",
    )
    exchange: Literal["auto", "all_gather", "all_to_all", "all_to_all_static"] = Field(
        "auto",
        description="how tokens reach their experts. all_gather: every rank receives every token. "
        "all_to_all: a token is sent to the ranks that hold one of its experts (the host reads the "
        "row counts). all_to_all_static: like all_to_all, in a buffer of fixed shape. "
        "auto: all_gather",
    )
    count_load: bool = Field(
        True,
        description="count the tokens that choose each expert (expert_load in /server_info)",
        json_schema_extra=OPERATIONAL,
    )


def check_ep_moe(context: CheckContext) -> Iterator[Refusal]:
    """Refuse models without routed experts, impossible numbers of ranks, and unusable exchanges."""
    held = context.of(ParallelOffers)
    place = next(
        (i for i, chosen in enumerate(held) if chosen.options is context.options), len(held)
    )
    facts = [found for found in (context.facts.model, context.facts.draft) if found is not None]
    if not context.facts.model.n_routed_experts:
        yield Refusal(
            NAME,
            f"parallel.{place}.use",
            f"{context.facts.model.architecture} has no routed experts to divide",
            f"leave {NAME} out (--ep-size, --enable-ep-moe)",
        )
        return
    if not any("tp" in before.offers.axes for before in held[:place]):
        yield Refusal(
            NAME,
            f"parallel.{place}.use",
            f"{NAME} divides experts among the ranks of a tensor-parallel strategy, and none is "
            "listed before it",
            f'[[parallel]] use = "tensor", size = '
            f"{context.options.size} before it (--tp {context.options.size})",
        )
        return
    yield from _sizes(context, f"parallel.{place}", [found.n_routed_experts for found in facts])


def _sizes(context: CheckContext, section: str, experts: list[int]) -> Iterator[Refusal]:
    """Refuse a size that does not divide the experts and ranks, or that the exchange cannot use."""
    size = context.options.size
    tp = context.values.mesh.get("tp", 1)
    fitting = [n for n in range(1, tp + 1) if not any(count % n for count in (tp, *experts))]
    reasons = [
        f"{count} experts cannot be divided evenly among {size} ranks"
        for count in sorted(set(experts))
        if count % size
    ]
    if tp % size:
        reasons.append(f"{size} does not divide the {tp} tensor-parallel ranks")
    sizes = " or ".join(map(str, fitting))
    for reason in reasons:
        yield Refusal(NAME, f"{section}.size", reason, f"{section}.size = {sizes}")
    if tp % size == 0 and tp != size and context.options.exchange.startswith("all_to_all"):
        whole = f"{section}.size = {tp}, or " if tp in fitting else ""
        yield Refusal(
            NAME,
            f"{section}.exchange",
            f"{context.options.exchange} needs each expert whole on one rank; with {size} shares "
            f"on {tp} ranks, {tp // size} ranks split the width of each expert",
            f'{whole}{section}.exchange = "all_gather"',
        )
    yield from _capture(context, section)


def _capture(context: CheckContext, section: str) -> Iterator[Refusal]:
    """Refuse the exchange ``all_to_all`` together with a graph runner that captures steps."""
    if context.options.exchange != "all_to_all":
        return
    for runner in context.of(GraphOffers):
        if runner.offers.captures:
            yield Refusal(
                NAME,
                f"{section}.exchange",
                "all_to_all sends a number of rows that depends on the routing, which "
                f"{runner.name} cannot capture",
                f'{section}.exchange = "all_to_all_static", or graphs.use = "eager"',
            )


@hookimpl
def register_parallel_strategies() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=EpMoeOptions,
            check=check_ep_moe,
            factory="glowplug.plugins.parallel.ep_moe_runtime:EpMoe",
            offers=ParallelOffers(axes=frozenset({"ep"}), ranks=True),
            summary="routed experts divided among ranks, with all-gather or all-to-all",
        )
    ]
