"""Refusals of a placement of experts, and the note on its balance. Plan zone: no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from glowplug.core.errors import Refusal
from glowplug.core.facts.expert_load import ExpertLoad
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import Decision
from glowplug.plugins.parallel.expert_placement import Placement, balancedness

NAME = "ep_moe"
#: ending of a recorded layer of a draft model that has the name of a layer of the target
OF_DRAFT = "(draft)"
NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.)")  #: the number of a layer in its module path


# ---- copies --------------------------------------------------------------------------------------


def misfit_copies(placement: Placement, experts: Sequence[int], section: str) -> Iterator[Refusal]:
    """Refuse redundant experts that are too many, or that ranks cannot divide evenly.

    Args:
        experts: numbers of routed experts of the model and of its draft.
        section: path of the strategy's section, such as ``parallel.1``.
    """
    ranks = placement.ranks
    redundant = placement.redundant
    if not redundant:
        return
    least = min(experts)
    most = least * (ranks - 1)
    reasons = [
        f"{count} experts and {redundant} redundant ones cannot be divided evenly among {ranks} "
        "ranks"
        for count in sorted(set(experts))
        if (count + redundant) % ranks
    ]
    if redundant > most:
        reasons = [
            f"{least} experts on {ranks} rank{'s' * (ranks > 1)} can have at most {most} copies, "
            f"since a rank has one copy of an expert; {redundant} are given"
        ]
    near = _fitting_copies(experts, ranks, most, redundant)
    field = f"{section}.redundant_experts"
    for reason in reasons:
        yield Refusal(NAME, field, reason, f"{field} = {' or '.join(map(str, near)) or '0'}")


def _fitting_copies(experts: Sequence[int], ranks: int, most: int, given: int) -> list[int]:
    """Return the two numbers of redundant experts nearest to ``given`` that divide evenly."""
    fitting = [
        number
        for number in range(most + 1)
        if not any((count + number) % ranks for count in experts)
    ]
    return sorted(sorted(fitting, key=lambda number: abs(number - given))[:2])


# ---- the recorded load ---------------------------------------------------------------------------


def unlike_model(placement: Placement, model: ModelFacts, section: str) -> Iterator[Refusal]:
    """Refuse a load that was recorded with another model.

    Args:
        section: path of the strategy's section, such as ``parallel.1``.
    """
    load = placement.load
    difference = "" if load is None else _difference(load, model)
    if load is not None and difference:
        yield Refusal(
            NAME,
            f"{section}.placement",
            f"the load was recorded with {load.model}, {difference}",
            "record the load of this model (GET /expert_load), or leave placement out",
        )


def _difference(load: ExpertLoad, model: ModelFacts) -> str:
    """Return in which way the load's model differs from ``model``; "" if it may be the same."""
    if load.architecture != model.architecture:
        return f"a {load.architecture}; the model is a {model.architecture}"
    routed = {layer for layer in range(model.num_layers) if model.sizes.routes(layer)}
    recorded = _by_number(load)
    last = model.num_layers  # the draft's layer follows the model's
    if not routed <= recorded.keys() or any(layer > last for layer in recorded):
        return f"with experts in {_span(recorded)}; this model has experts in {_span(routed)}"
    others = {recorded[layer] for layer in routed} - {model.n_routed_experts}
    return f"with {min(others)} experts; this model has {model.n_routed_experts}" if others else ""


def _by_number(load: ExpertLoad) -> dict[int, int]:
    """Return the number of experts by the number of the layer."""
    found = ((NUMBER.search(layer), counts) for layer, counts in load.layers.items())
    return {
        int(number[1]): len(counts)
        for number, counts in found
        if number is not None and not number.string.endswith(OF_DRAFT)
    }


def _span(layers: Collection[int]) -> str:
    """Convert numbers of layers to text: how many there are, the smallest and the largest."""
    count = len(layers)
    return f"{count} layers" + (f", numbers {min(layers)} to {max(layers)}" if layers else "")


def balance_remark(section: str, placement: Placement) -> Decision | None:
    """Return the note on the balance that a placement gives for its recorded load.

    None: there is no recorded load, or each rank holds every expert.
    """
    load = placement.load
    if load is None or placement.contiguous:
        return None
    ranks = placement.ranks
    layers = [
        (counts, slots)
        for layer, counts in load.layers.items()
        if (len(counts) + placement.redundant) % ranks == 0
        and (slots := placement.slots(layer, len(counts))) is not None
    ]
    before = ""
    if not any(len(counts) % ranks for counts, _ in layers):
        share = balancedness(((counts, range(len(counts))) for counts, _ in layers), ranks)
        before = f"; {share:.1%} with consecutive experts"
    return Decision(
        f"{section}.balance",
        f"{balancedness(layers, ranks):.1%}",
        NAME,
        "mean load of a rank by that of the most loaded one, for the load recorded with "
        f"{load.model}{before}",
        notable=True,
    )
