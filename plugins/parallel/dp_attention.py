"""Data-parallel attention: each group of ranks attends for its own requests; MLPs use all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator
from pydantic_core import PydanticCustomError

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.modes import AutoSize, DecidedSize
from glowplug.core.plugin.offers import ParallelOffers
from glowplug.core.plugin.options import ParallelOptions
from glowplug.plugins.parallel.layout_table import decided_groups

NAME = "dp_attention"


class DpAttentionOptions(ParallelOptions):
    use: Literal["dp_attention"] = "dp_attention"
    # NOTE: a number, or "auto" until the plan has decided the number
    size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(  # type: ignore[assignment]
        1,
        description="groups of ranks, each with its own requests, scheduler and KV cache; the "
        "tensor ranks are divided evenly among them; auto: the number measured fastest for "
        "scheduler.max_running_requests on this card, or no groups",
    )

    @field_validator("size", mode="wrap")
    @classmethod
    def _one_problem(cls, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        """Return ``value`` as a size; report one problem, not one for each form of a size."""
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError(
                "size",
                "{value} is no number of groups",
                {"value": repr(value), "fix": 'a number from 1 on, or "auto"'},
            ) from None


def check_dp_attention(context: CheckContext) -> Iterator[Refusal]:
    """Refuse a number of groups that does not divide the number of tensor-parallel ranks.

    The tensor-parallel ranks must be defined by a strategy listed before this one. That strategy
    checks whether heads and vocabulary can be split over the ranks of a group.
    """
    groups = context.options.size
    ranks = context.values.mesh.get("tp", 1)
    refusal = _without_ranks(context, max(2, groups))
    if refusal is not None:
        yield refusal
    elif ranks % groups:
        fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
        yield Refusal(
            NAME,
            f"parallel.{_place(context)}.size",
            f"{ranks} tensor ranks cannot be divided evenly among {groups} groups",
            _instead(fits, groups),
        )


def _place(context: CheckContext) -> int:
    """Return the strategy's place in the list."""
    held = context.of(ParallelOffers)
    return next((at for at, chosen in enumerate(held) if chosen.options is context.options), 0)


def _without_ranks(context: CheckContext, wanted: int) -> Refusal | None:
    """Return the refusal of a plan without tensor ranks to divide; None if there are any.

    ``wanted``: number of tensor ranks that the fix states.
    """
    place = _place(context)
    if not any("tp" in before.offers.axes for before in context.of(ParallelOffers)[:place]):
        return Refusal(
            NAME,
            f"parallel.{place}.use",
            "data-parallel attention divides the tensor ranks into groups, and no strategy listed "
            "before it defines tensor ranks",
            f'[[parallel]] use = "tensor", size = {wanted} before it',
        )
    if context.values.mesh.get("tp", 1) > 1:
        return None
    return Refusal(
        NAME,
        f"parallel.{place}.size",
        "data-parallel attention divides the tensor ranks into groups, and there is only one rank",
        f"more tensor ranks (size = {wanted}), or leave {NAME} out",
    )


def decide_groups(context: CheckContext) -> DecidedSize | Refusal:
    """Return the number of groups for "auto", or the refusal of a plan without tensor ranks."""
    return _without_ranks(context, 2) or decided_groups(context, NAME)


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
            offers=ParallelOffers(
                axes=frozenset({"dp"}),
                ranks=True,
                idle_steps=True,
                auto_size=AutoSize(
                    decide_groups, "glowplug.plugins.parallel.layout_table:save_table"
                ),
            ),
            check=check_dp_attention,
            summary="groups of ranks with their own requests and KV cache; MLPs over all ranks",
        )
    ]
