"""Pass three: choice of device, dtype and components.

Explicit values are always kept. Each ``auto`` takes the first candidate that no check refuses. Each
choice is recorded as a Decision with its reason. Plan zone: no torch.
"""

from __future__ import annotations

from dataclasses import replace

from glowplug.core.errors import Refusal
from glowplug.core.plan.candidates import contributed, pick
from glowplug.core.plan.checks.adaptive import decide_adaptive, possible_shapes
from glowplug.core.plan.checks.checkpoint import quantized_as
from glowplug.core.plan.checks.last_layer import choose_last_layer
from glowplug.core.plan.device import choose_device, choose_dtypes
from glowplug.core.plan.draft_model import choose_draft_model, choose_draft_source
from glowplug.core.plan.kv_entries import own_cache_family
from glowplug.core.plan.proposal import Proposal, chosen_of, options_of
from glowplug.core.plugin.component import ChosenOf, Component, Options
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.offers import ModelOffers, ParallelOffers
from glowplug.core.plugin.options import ParallelOptions
from glowplug.core.plugin.slots import SLOTS, Slot

#: guide to writing a model family, for refusals of unknown architectures
FAMILY_GUIDE = "docs/writing-a-plugin.md#a-model-family"

AUTO = "auto"  #: size of a strategy that the plan decides


def choose(proposal: Proposal) -> None:
    """Fill ``proposal.chosen`` and ``proposal.values``; refuse slots without a candidate."""
    choose_device(proposal)
    choose_dtypes(proposal)
    _choose_model(proposal)
    open_slots = [slot for slot in SLOTS if slot.section and not _take_given(proposal, slot)]
    _decide_numbers(proposal)
    _decide_sizes(proposal)
    for slot in open_slots:
        pick(proposal, slot)
        if slot.name in ("speculative", "parallel"):
            _decide_numbers(proposal)
    _decide_overlap(proposal)
    _remark_on_chain(proposal)
    _remark_on_quantization(proposal)
    decide_adaptive(proposal)
    choose_last_layer(proposal)
    choose_draft_model(proposal)
    choose_draft_source(proposal)


# ---- the model family ----------------------------------------------------------------------------


def _choose_model(proposal: Proposal) -> None:
    """Choose the model family that builds the checkpoint's architecture."""
    architecture = proposal.facts.model.architecture
    for family, offers in _families(proposal):
        if architecture in offers.architectures:
            proposal.chosen["model"] = (chosen_of(family, options_of(family)),)
            proposal.decide(
                "model.family", family.name, "facts", f"config.json states {architecture}"
            )
            return
        if architecture in offers.draft_architectures:
            proposal.refusals.append(_draft_alone(proposal, family.name, "a next-token layer"))
            return
        if architecture in offers.eagle_architectures:
            proposal.refusals.append(_draft_alone(proposal, family.name, "an EAGLE head"))
            return
    known = sorted({name for _, offers in _families(proposal) for name in offers.architectures})
    proposal.refusals.append(
        Refusal(
            "choose",
            "model",
            f"no plugin builds {architecture} (known: {', '.join(known) or 'none'})",
            f"a model of a known architecture, or a plugin that registers this one: {FAMILY_GUIDE}",
        )
    )


def _families(proposal: Proposal) -> list[tuple[Component, ModelOffers]]:
    """Return the registered model families with their offers."""
    found = (registration.component for registration in proposal.plugins.components("model"))
    return [(family, family.offers) for family in found if isinstance(family.offers, ModelOffers)]


def _draft_alone(proposal: Proposal, family: str, what: str) -> Refusal:
    """Return the refusal of a model folder that holds only ``what``, a kind of draft."""
    model = proposal.facts.model
    return Refusal(
        family,
        "model",
        f"{model.path} is a {model.architecture}: {what}, which drafts for a "
        "model and cannot run alone",
        f'model = the checkpoint it comes from, with speculative.draft_model = "{model.path}"',
        proposal.origin("model", family),
    )


# ---- given components ----------------------------------------------------------------------------


def _take_given(proposal: Proposal, slot: Slot) -> bool:
    """Fill a slot with the components that the operator or the slot's own default names.

    Returns:
        True if the slot was filled. False if candidates have to be tried: ``use`` is "auto", or
        is a default that a plugin or the caller sets, which is replaced if it does not fit.
    """
    if slot.many:
        _take_many(proposal, slot)
        return True
    (options,) = proposal.config.section(slot)
    if options.use == "auto" or contributed(proposal, slot):
        return False
    _put(proposal, slot, options)
    by, why = proposal.source(f"{slot.section}.use") or (
        "default",
        _summary(proposal, slot, options.use),
    )
    proposal.decide(f"{slot.section}.use", options.use, by, why)
    return True


def _take_many(proposal: Proposal, slot: Slot) -> None:
    """Fill a slot that may hold several components: with the given ones, else with its default."""
    given = proposal.config.section(slot)
    for number, options in enumerate(given):
        _put(proposal, slot, options)
        by, why = (
            proposal.source(f"{slot.section}.{number}.use")
            or proposal.source(slot.section)
            or ("default", _summary(proposal, slot, options.use))
        )
        proposal.decide(f"{slot.section}.{number}.use", options.use, by, why)
    if not given and slot.default == "auto":
        by, why = proposal.source(slot.section) or ("default", "none is given")
        proposal.decide(slot.section, "none", by, why)
    elif not given:
        _take_default(proposal, slot)


def _take_default(proposal: Proposal, slot: Slot) -> None:
    """Put the default component into a slot that may hold several."""
    found = proposal.plugins.find(slot.name, slot.default)
    if found is None:
        proposal.refusals.append(
            Refusal(
                "choose",
                slot.section,
                f"the default {slot.default!r} is not registered",
                f"write a [[{slot.section}]] section, or do not block its plugin",
            )
        )
        return
    _put(proposal, slot, options_of(found.component))
    by, why = proposal.source(slot.section) or ("default", found.component.summary)
    proposal.decide(f"{slot.section}.0.use", slot.default, by, why)


def _put(proposal: Proposal, slot: Slot, options: Options) -> None:
    """Add the component that ``options.use`` names to the slot, with these options."""
    found = proposal.plugins.find(slot.name, options.use)
    assert found is not None, f"{slot.name} {options.use} was parsed, so it is registered"
    proposal.chosen[slot.name] += (chosen_of(found.component, options),)


def _summary(proposal: Proposal, slot: Slot, name: str) -> str:
    found = proposal.plugins.find(slot.name, name)
    return found.component.summary if found is not None else ""


# ---- numbers that checks read --------------------------------------------------------------------


def _decide_numbers(proposal: Proposal) -> None:
    """Decide width, lookahead, draft, mesh, ranks and hosts from the components chosen so far."""
    values = proposal.values
    speculative = proposal.speculative
    values.draft_shape = _draft_shape(proposal)
    values.draft_shapes = possible_shapes(proposal)
    values.width = values.draft_shape.tokens
    values.lookahead = speculative.options.lookahead() if speculative else 0
    path = proposal.facts.model.path
    values.draft_folder = speculative.options.draft_for(path) if speculative else None
    layers = _draft_layers(proposal)
    values.draft_extends = layers > 0
    values.draft_layers = 0 if own_cache_family(proposal) else layers
    mesh: dict[str, int] = {}
    for strategy in proposal.parallel:
        size = getattr(strategy.options, "size", 1)
        if size != AUTO:
            mesh.update(dict.fromkeys(sorted(strategy.offers.axes), size))
    values.mesh = mesh
    values.ranks = max(mesh.get("tp", 1) * mesh.get("pp", 1), mesh.get("world", 1), 1)
    values.hosts = _hosts(proposal)


def _decide_sizes(proposal: Proposal) -> None:
    """Decide the sizes of strategies that are "auto", and leave out those of size 1."""
    sized = [_sized(proposal, *numbered) for numbered in enumerate(proposal.parallel)]
    kept = tuple(strategy for strategy in sized if strategy is not None)
    if kept != proposal.parallel:
        proposal.chosen["parallel"] = kept
        _decide_numbers(proposal)


def _sized(
    proposal: Proposal, number: int, strategy: ChosenOf[ParallelOffers, ParallelOptions]
) -> ChosenOf[ParallelOffers, ParallelOptions] | None:
    """Return a strategy with its size decided; None if it is left out or refused.

    Args:
        number: place of the strategy in the list.
    """
    if getattr(strategy.options, "size", 1) != AUTO:
        return strategy
    field = f"parallel.{number}.size"
    auto = strategy.offers.auto_size
    found = auto.decide(proposal.context(strategy.options)) if auto else _no_auto(strategy, field)
    if isinstance(found, Refusal):
        proposal.refusals.append(replace(found, origin=proposal.origin("parallel", strategy.name)))
        return None
    proposal.decide(field, found.size, AUTO, found.why, notable=True)
    if found.size == 1:
        return None
    return replace(strategy, options=strategy.options.model_copy(update={"size": found.size}))


def _no_auto(strategy: ChosenOf[ParallelOffers, ParallelOptions], field: str) -> Refusal:
    """Return the refusal of the size "auto" of a strategy that does not decide it."""
    reason = f"{strategy.name} does not offer auto_size, which decides the size"
    return Refusal(strategy.name, field, reason, f"{field} = a number")


def _draft_shape(proposal: Proposal) -> DraftShape:
    """Return the size of the drafts of a round: the configured one.

    A tree becomes a chain of as many steps if the operator chose attention for chains only.
    """
    speculative = proposal.speculative
    if speculative is None:
        return DraftShape()
    shape = speculative.options.draft_shape()
    attention = proposal.attention
    given = proposal.written("attention.use")
    if not shape.is_tree or attention is None or attention.offers.tree or not given:
        return shape
    return DraftShape.chain(shape.steps)


def _draft_layers(proposal: Proposal) -> int:
    """Return the number of layers of a draft that continues the target's hidden states."""
    speculative = proposal.speculative
    if speculative is None:
        return 0
    own = speculative.options.draft_layers(proposal.facts.draft or proposal.facts.model)
    offers = speculative.offers
    return int(offers.nextn_layer or offers.eagle_head) if own is None else own


def _hosts(proposal: Proposal) -> int:
    """Return the number of hosts: as given, else the fewest with enough devices or cores."""
    machine = proposal.facts.hardware
    given = proposal.config.executor.hosts
    if given is not None:
        return given
    each = len(machine.devices) if proposal.values.device == "cuda" else machine.cpu_cores
    return max(1, min(machine.hosts, -(-proposal.values.ranks // max(1, each))))


def _remark_on_chain(proposal: Proposal) -> None:
    """Record the decision that a chain is drafted in place of the configured tree."""
    speculative = proposal.speculative
    attention = proposal.attention
    if speculative is None or attention is None:
        return
    if speculative.options.draft_shape().is_tree and not proposal.values.draft_shape.is_tree:
        why = f"{attention.name} reads causal chains only, so the drafts form a chain"
        source = proposal.source("speculative.topk")
        if source is not None:
            why += f" in spite of {source[1]}"
        proposal.decide("speculative.topk", 1, attention.name, why, notable=True)


def _remark_on_quantization(proposal: Proposal) -> None:
    """Record the decision whether a scheme that the operator chose quantizes the weights itself."""
    scheme = proposal.quantization
    method = proposal.facts.model.quant_method
    if scheme is None or not proposal.written("quantization.use"):
        return
    if method == "none" and scheme.offers.online:
        value, why = "quantized while loading", "the checkpoint is not quantized"
    elif method != "none" and method in scheme.offers.reads:
        stored = quantized_as(proposal.facts.model)
        value, why = "as stored", f"the checkpoint is already {stored}; nothing is quantized again"
    else:
        return
    proposal.decide("quantization.weights", value, scheme.name, why, notable=True)


def _decide_overlap(proposal: Proposal) -> None:
    """Decide whether steps overlap: one is launched before the last one's results are read.

    By default steps overlap on a GPU, where the host would otherwise wait, and not on a CPU. All
    components of a step must allow it.
    """
    given = proposal.config.scheduler.overlap
    wanted = proposal.values.device != "cpu" if given is None else given
    waiting = [chosen.name for _, chosen in proposal.step_path() if not chosen.offers.overlap]
    overlap = wanted and not waiting
    source = proposal.source("scheduler.overlap")
    if source is not None and given == overlap:
        by, why = source
    elif overlap:
        by = "auto"
        why = "the next step starts before the results of the last one are read"
    elif wanted:
        by = waiting[0]
        why = f"{', '.join(waiting)} waits for the device during a step"
    else:
        by = "auto"
        why = "the CPU computes a step while launching it"
    proposal.values.overlap = overlap
    proposal.decide("scheduler.overlap", overlap, by, why, notable=bool(waiting and wanted))
