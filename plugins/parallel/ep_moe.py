"""Expert parallelism: each rank holds a share of the routed experts.

Tokens are sent to the ranks of their experts, and the results are sent back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.facts.expert_load import ExpertLoadFile
from glowplug.core.facts.mesh import axis_size, divides
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.byte_costs import ExchangeSizes
from glowplug.core.plugin.component import OPERATIONAL, CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CollectiveOffers, GraphOffers, ParallelOffers
from glowplug.core.plugin.options import ParallelOptions
from glowplug.kernels.collectives.buffer_sizes import WORD_BYTES, buffer_words, token_words
from glowplug.kernels.collectives.exchange_tables import FoundTable, exchange_table, fastest_up_to
from glowplug.plugins.parallel.expert_placement import Placement
from glowplug.plugins.parallel.placement_check import (
    balance_remark,
    misfit_copies,
    unlike_model,
)

NAME = "ep_moe"
ALL_GATHER = "all_gather"
PUSH = "push"
#: reason of the exchange that "auto" takes without measured times
DEFAULT_REASON = (
    "every rank receives every token, in large steps as FP8 values and scales if the experts take "
    "them"
)
#: most tokens of a rank in a step that the exchange "push" sends
PUSHED_ROWS_MAX = 256


class EpMoeOptions(ParallelOptions):
    use: Literal["ep_moe"] = "ep_moe"
    size: int = Field(
        1,
        ge=1,
        description="number of shares into which the experts are divided; it divides the tensor "
        "ranks, and the ranks of one share split the width of their experts",
    )
    exchange: Literal["auto", "all_gather", "push", "all_to_all", "all_to_all_static"] = Field(
        "auto",
        description="how tokens reach their experts. all_gather: every rank receives every token. "
        "push: a token is stored into the memory of the GPUs that hold one of its experts, in "
        f"steps of up to {PUSHED_ROWS_MAX} tokens a rank; larger steps use all_gather. "
        "all_to_all: a token is sent to the ranks that hold one of its experts (the host reads the "
        "row counts). all_to_all_static: like all_to_all, in a buffer of fixed shape. "
        "auto: push up to the number of tokens at which it was measured faster on this card and "
        "number of ranks, else all_gather",
    )
    count_load: bool = Field(
        True,
        description="count the tokens that choose each expert (expert_load in /server_info)",
        json_schema_extra=OPERATIONAL,
    )
    redundant_experts: int = Field(
        0,
        ge=0,
        description="copies of experts that each layer has beside its routed experts; the copies "
        "of an expert are on different ranks and share its tokens",
    )
    placement: ExpertLoadFile | None = Field(
        None,
        description="file with a recorded load (GET /expert_load), by which experts and their "
        "copies are placed; None: each rank holds consecutive experts, and copies are spread "
        "evenly",
    )

    def placed(self) -> Placement:
        """Return the placement of the experts on ``size`` shares."""
        return Placement(self.placement, self.redundant_experts, self.size)

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        return {"placement": "each rank holds every expert"} if self.size == 1 else {}


def tokens_stay(options: EpMoeOptions, mesh: Mapping[str, int]) -> bool:
    """Return whether every rank has all tokens, so that the exchange moves none.

    Args:
        options: the strategy's options.
        mesh: mesh axis -> size.
    """
    return axis_size("dp", mesh) == 1 and not options.exchange.startswith("all_to_all")


def exchanges(options: EpMoeOptions, mesh: Mapping[str, int]) -> bool:
    """Return whether tokens move between ranks; see ``tokens_stay``."""
    return not tokens_stay(options, mesh)


class ChosenExchange(NamedTuple):
    """The exchange of a plan.

    Attributes:
        name: value of the option ``exchange``, never "auto".
        rows: most tokens of a rank in a step that are pushed; 0 unless ``name`` is "push".
        why: reason of a choice by "auto", for the plan.
    """

    name: str
    rows: int
    why: str = ""


def chosen_exchange(sizes: ExchangeSizes, pushes: bool) -> ChosenExchange:
    """Return the exchange that the options name, or for "auto" the fastest measured one.

    NOTE: "auto" takes "push" or "all_gather" only, since "push" leaves larger steps to the latter;
    the other two exchange all steps in the same way.

    Args:
        sizes: the strategy's largest exchanges.
        pushes: the collectives can push tokens.
    """
    named = sizes.options.exchange
    tp = axis_size("tp", sizes.mesh)
    if named == PUSH:
        return ChosenExchange(PUSH, pushed_rows(sizes.mesh, sizes.tokens))
    if named != "auto":
        return ChosenExchange(named, 0)
    if tp == 1 or not pushes or not sizes.card or tokens_stay(sizes.options, sizes.mesh):
        return ChosenExchange(ALL_GATHER, 0, DEFAULT_REASON)
    return _measured_exchange(sizes, exchange_table(sizes.card, tp, sizes.dtype))


def _measured_exchange(sizes: ExchangeSizes, found: FoundTable) -> ChosenExchange:
    """Return the fastest exchange by a table, or the default where there is none."""
    if found.table is None or not found.table.exchange:
        lacks = "" if found.table is None else ", without exchanges of experts' tokens"
        return ChosenExchange(ALL_GATHER, 0, f"{DEFAULT_REASON}; {found.why}{lacks}: default")
    measured = fastest_up_to(found.table.exchange, PUSH, [ALL_GATHER])
    # NOTE: as many bytes as were measured; tokens of the table have another hidden size
    rows = measured * found.table.hidden // sizes.hidden
    if not rows:
        return ChosenExchange(ALL_GATHER, 0, f"{found.why}: faster than {PUSH} for few tokens")
    rows = pushed_rows(sizes.mesh, sizes.tokens, rows)
    why = f"{found.why}: faster up to {rows} tokens a rank; larger steps use {ALL_GATHER}"
    return ChosenExchange(PUSH, rows, why)


def pushed_rows(mesh: Mapping[str, int], tokens: int, most: int = PUSHED_ROWS_MAX) -> int:
    """Return the most tokens of a rank that the exchange "push" sends in a step.

    The result is 0 if every rank has all tokens, so that none need to be sent.

    Args:
        mesh: mesh axis -> size.
        tokens: most tokens of a step of one rank.
        most: largest result.
    """
    if not divides(mesh) or axis_size("dp", mesh) == 1:
        return 0
    return min(PUSHED_ROWS_MAX, most, -(-tokens // axis_size("attn_tp", mesh)))


def buffer_bytes(sizes: ExchangeSizes) -> int:
    """Return the bytes of each GPU's buffers for the exchange "push"; 0 for other exchanges."""
    rows = chosen_exchange(sizes, pushes=True).rows
    words = token_words(sizes.hidden * WORD_BYTES, sizes.experts_per_token)
    kinds = 2  # dispatch and combine
    return kinds * buffer_words(axis_size("tp", sizes.mesh), rows * words) * WORD_BYTES


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
    section = f"parallel.{place}"
    yield from _shares(context, section, [found.n_routed_experts for found in facts])
    yield from _capture(context, section)
    yield from _peers(context, section)


def _shares(context: CheckContext, section: str, experts: list[int]) -> Iterator[Refusal]:
    """Refuse a placement or a number of shares that does not fit the experts and the ranks."""
    placement: Placement = context.options.placed()
    yield from unlike_model(placement, context.facts.model, section)
    misfits = list(misfit_copies(placement, experts, section))
    yield from misfits
    slots = [count + placement.redundant for count in experts]
    yield from _sizes(context, section, [] if misfits else slots)


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


def _peers(context: CheckContext, section: str) -> Iterator[Refusal]:
    """Refuse the exchange ``push`` without access to the memory of other ranks' GPUs."""
    if context.options.exchange != PUSH or context.values.ranks == 1:
        return
    for collectives in context.of(CollectiveOffers):
        if not collectives.offers.expert_rows:
            yield Refusal(
                NAME,
                f"{section}.exchange",
                f"push stores tokens into the memory of other GPUs, and {collectives.name} has no "
                "access to it",
                f'{section}.exchange = "all_gather"',
            )


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


def expert_copies(options: EpMoeOptions) -> int | None:
    """Return the number of copies of experts; None if each rank holds consecutive experts."""
    return None if options.placed().contiguous else options.redundant_experts


@hookimpl
def plan_remarks(context: CheckContext) -> list[Decision]:
    """Return notes on how tokens are sent, and on the balance of a placement by recorded load."""
    remarks: list[Decision | None] = []
    for place, chosen in enumerate(context.of(ParallelOffers)):
        if isinstance(chosen.options, EpMoeOptions):
            section = f"parallel.{place}"
            remarks.append(_exchange_remark(section, chosen.options, context))
            remarks.append(balance_remark(section, chosen.options.placed()))
    return [remark for remark in remarks if remark is not None]


def _exchange_remark(section: str, options: EpMoeOptions, context: CheckContext) -> Decision | None:
    """Return the note on the exchange that ``auto`` takes; None if no tokens move."""
    mesh = context.values.mesh
    if options.exchange != "auto" or tokens_stay(options, mesh) or axis_size("tp", mesh) == 1:
        return None
    pushes = any(found.offers.expert_rows for found in context.of(CollectiveOffers))
    rows = PUSHED_ROWS_MAX * axis_size("attn_tp", mesh)
    sizes = ExchangeSizes.of(context.facts, options, mesh, rows, context.values.dtype)
    found = chosen_exchange(sizes, pushes)
    return Decision(f"{section}.exchange", found.name, "auto", found.why)


@hookimpl
def register_parallel_strategies() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=EpMoeOptions,
            check=check_ep_moe,
            factory="glowplug.plugins.parallel.ep_moe_runtime:EpMoe",
            offers=ParallelOffers(
                axes=frozenset({"ep"}),
                ranks=True,
                exchanges=exchanges,
                buffer_bytes=buffer_bytes,
                expert_copies=expert_copies,
            ),
            summary="routed experts divided among ranks, with all-gather, push or all-to-all",
        )
    ]
