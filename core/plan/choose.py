"""Pass three: choice of device, dtype and components.

Explicit values are always kept. Each ``auto`` takes the first candidate that no check refuses. Each
choice is recorded as a Decision with its reason. Plan zone: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.checks.components import component_checks, provider_checks
from glowplug.core.plan.checks.last_layer import choose_last_layer
from glowplug.core.plan.checks.rules import run_checks, use_field
from glowplug.core.plan.proposal import Proposal, chosen_of, options_of
from glowplug.core.plugin.component import CONTRACT, Chosen, Component, Options
from glowplug.core.plugin.loading import Registration
from glowplug.core.plugin.offers import FLOAT_DTYPES, ModelOffers, ParallelOffers
from glowplug.core.plugin.options import SpeculativeOptions
from glowplug.core.plugin.requirements import missing_packages
from glowplug.core.plugin.slots import SLOTS, Slot

#: guide to writing a model family, for refusals of unknown architectures
FAMILY_GUIDE = "docs/writing-a-plugin.md#a-model-family"


def choose(proposal: Proposal) -> None:
    """Fill ``proposal.chosen`` and ``proposal.values``; slots without a candidate become refusals."""
    _device(proposal)
    _dtype(proposal)
    _model(proposal)
    open_slots = [slot for slot in SLOTS if slot.section and not _take_asked(proposal, slot)]
    _numbers(proposal)
    for slot in open_slots:
        _pick(proposal, slot)
        if slot.name in ("speculative", "parallel"):
            _numbers(proposal)
    _overlap(proposal)
    choose_last_layer(proposal)


# ---- device and dtype ----------------------------------------------------------------------------


def _device(proposal: Proposal) -> None:
    """Decide the device."""
    asked = proposal.config.device
    machine = proposal.facts.hardware
    if asked != "auto":
        by, why = proposal.source("device") or ("default", "")
        proposal.decide("device", asked, by, why)
        if asked == "cuda":
            _require_cuda(proposal)
        proposal.values.device = asked
        return
    device = "cpu"
    why = f"{machine.name} has no CUDA device"
    if machine.devices:
        device = "cuda"
        why = f"{machine.name}: {machine.devices[0].name}"
        if _cpu_torch(proposal):
            device = "cpu"
            why = "the installed torch is a CPU build"
        for slot in SLOTS:
            if slot.step and not _any_offers(proposal, slot, device):
                device = "cpu"
                why = f"no {slot.name} component offers cuda"
    proposal.values.device = device
    proposal.decide(
        "device", device, "auto", why, notable=device == "cpu" and bool(machine.devices)
    )


def _require_cuda(proposal: Proposal) -> None:
    """Refuse the device "cuda" if the machine has none or torch cannot use it."""
    machine = proposal.facts.hardware
    build = _cpu_torch(proposal)
    if not machine.devices:
        proposal.refusals.append(
            Refusal("choose", "device", f"{machine.name} has no CUDA device", 'device = "cpu"')
        )
    elif build:
        proposal.refusals.append(
            Refusal(
                "choose",
                "device",
                f"the installed torch is a CPU build ({build})",
                'device = "cpu", or pip install a CUDA build of torch',
            )
        )


def _cpu_torch(proposal: Proposal) -> str:
    """Return the version of the installed torch if it is a CPU build, else ""."""
    version = proposal.facts.software.packages.get("torch", "")
    return version if "+cpu" in version else ""


def _any_offers(proposal: Proposal, slot: Slot, device: str) -> bool:
    """Return whether a component that the slot may get runs on ``device``."""
    found = proposal.plugins.components(slot.name)
    asked = {options.use for options in proposal.config.section(slot)} - {"auto"}
    return any(
        device in r.component.offers.devices
        for r in found
        if not asked or r.component.name in asked
    )


def _dtype(proposal: Proposal) -> None:
    """Decide the compute dtype and the KV cache's dtype."""
    asked: str = proposal.config.dtype
    checkpoint = proposal.facts.model.dtype
    if asked != "auto":
        by, why = proposal.source("dtype") or ("default", "")
    elif proposal.values.device == "cpu":
        asked = "float32"
        by = "auto"
        why = "exact, and bfloat16 is slow on most CPUs"
    elif checkpoint in FLOAT_DTYPES:
        asked = checkpoint
        by = "auto"
        why = "the checkpoint's"
    else:
        asked = "bfloat16"
        by = "auto"
        why = f"the checkpoint is {checkpoint}"
    proposal.values.dtype = asked
    proposal.decide("dtype", asked, by, why)
    kv = proposal.config.attention.kv_dtype
    source = proposal.source("attention.kv_dtype")
    proposal.values.kv_dtype = asked if kv == "auto" else kv
    if kv == "auto" or source is None:
        source = ("auto", "the compute dtype")
    proposal.decide("attention.kv_dtype", proposal.values.kv_dtype, *source)


# ---- components ----------------------------------------------------------------------------------


def _model(proposal: Proposal) -> None:
    """Choose the model family that builds the checkpoint's architecture."""
    architecture = proposal.facts.model.architecture
    known: set[str] = set()
    for found in proposal.plugins.components("model"):
        assert isinstance(found.component.offers, ModelOffers)
        known |= found.component.offers.architectures
        if architecture in found.component.offers.architectures:
            proposal.chosen["model"] = (chosen_of(found.component, options_of(found.component)),)
            proposal.decide(
                "model.family", found.component.name, "facts", f"config.json states {architecture}"
            )
            return
        if architecture in found.component.offers.draft_architectures:
            proposal.refusals.append(_draft_alone(proposal, found.component.name))
            return
    proposal.refusals.append(
        Refusal(
            "choose",
            "model",
            f"no plugin builds {architecture} (known: {', '.join(sorted(known)) or 'none'})",
            f"a model of a known architecture, or a plugin that registers this one: {FAMILY_GUIDE}",
        )
    )


def _draft_alone(proposal: Proposal, family: str) -> Refusal:
    """Return the refusal of a model folder that holds only a next-token layer."""
    model = proposal.facts.model
    return Refusal(
        family,
        "model",
        f"{model.path} is a {model.architecture}: a next-token layer, which drafts for a "
        "model and cannot run alone",
        f'model = the checkpoint it comes from, with speculative.draft_model = "{model.path}"',
        proposal.origin("model", family),
    )


def _take_asked(proposal: Proposal, slot: Slot) -> bool:
    """Fill a slot with the components that the operator or a default names.

    Returns:
        False if the slot stays open, because ``use`` is "auto" or a contributed default. A
        contributed component is tried first and replaced if it does not fit.
    """
    asked = proposal.config.section(slot)
    if slot.many:
        return _take_many(proposal, slot, asked)
    options = asked[0]
    if options.use == "auto" or _contributed(proposal, slot):
        return False
    _put(proposal, slot, options.use, options)
    by, why = proposal.source(f"{slot.section}.use") or (
        "default",
        _summary(proposal, slot, options.use),
    )
    proposal.decide(f"{slot.section}.use", options.use, by, why)
    return True


def _take_many(proposal: Proposal, slot: Slot, asked: tuple[Options, ...]) -> bool:
    """Fill a slot that holds several components; the result is always True: none stays open."""
    for number, options in enumerate(asked):
        _put(proposal, slot, options.use, options)
        by, why = (
            proposal.source(f"{slot.section}.{number}.use")
            or proposal.source(slot.section)
            or ("default", _summary(proposal, slot, options.use))
        )
        proposal.decide(f"{slot.section}.{number}.use", options.use, by, why)
    if asked or slot.default == "auto":
        if not asked:
            proposal.decide(
                slot.section,
                "none",
                *(proposal.source(slot.section) or ("default", "none is given")),
            )
        return True
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
        return True
    _put(proposal, slot, slot.default, options_of(found.component))
    by, why = proposal.source(slot.section) or ("default", found.component.summary)
    proposal.decide(f"{slot.section}.0.use", slot.default, by, why)
    return True


def _put(proposal: Proposal, slot: Slot, name: str, options: Options) -> None:
    """Add a registered component to its slot."""
    found = proposal.plugins.find(slot.name, name)
    assert found is not None, f"{slot.name} {name} was parsed, so it is registered"
    proposal.chosen[slot.name] += (chosen_of(found.component, options),)


def _summary(proposal: Proposal, slot: Slot, name: str) -> str:
    found = proposal.plugins.find(slot.name, name)
    return found.component.summary if found is not None else ""


def _contributed(proposal: Proposal, slot: Slot) -> str:
    """Return the component that a plugin or an entry point contributes for the slot.

    The result is "" if the operator gave ``use``, or nothing is contributed.
    """
    path = f"{slot.section}.use"
    return (
        proposal.config.section(slot)[0].use
        if path in proposal.parsed.origins and not proposal.written(path)
        else ""
    )


def _pick(proposal: Proposal, slot: Slot) -> None:
    """Fill an open slot with the first candidate that no check refuses.

    A contributed component is tried first. If any candidate supports the model's attention kind,
    only such candidates are tried.
    """
    asked = proposal.config.section(slot)[0]
    given = asked.model_dump(mode="json", include=asked.model_fields_set - {"use"})
    kind = proposal.facts.model.kind
    wanted = _contributed(proposal, slot)
    found = sorted(
        proposal.plugins.components(slot.name), key=lambda found: found.component.name != wanted
    )
    candidates = [
        one for one in found if kind in getattr(one.component.offers, "kinds", {kind})
    ] or found
    reasons: list[str] = []
    notable = False
    proposal.trying = True
    for candidate in candidates:
        refusal = _try(proposal, slot, candidate, given)
        if refusal is None:
            source = (
                proposal.source(f"{slot.section}.use")
                if candidate.component.name == wanted
                else None
            )
            by, why = source or ("auto", _why(candidate, reasons))
            proposal.decide(f"{slot.section}.use", candidate.component.name, by, why, notable)
            proposal.picked.add(slot.name)
            break
        reasons.append(refusal.reason)
        notable = notable or proposal.values.device in candidate.component.offers.devices
    proposal.trying = False
    if slot.name not in proposal.picked:
        failed = [
            refusal
            for candidate in candidates
            if (refusal := _try(proposal, slot, candidate, given))
        ]
        proposal.chosen[slot.name] = ()
        proposal.refusals.append(_nothing_fits(slot, failed))


def _try(
    proposal: Proposal, slot: Slot, found: Registration, given: dict[str, Any]
) -> Refusal | None:
    """Put a candidate with the options given for the slot into it.

    Returns:
        The first refusal of the candidate, or None if it fits.
    """
    component = found.component
    try:
        options = options_of(component, given)
    except ValidationError as error:  # the candidate narrows an option of the slot's base
        problem = error.errors(include_url=False)[0]
        key = str(problem["loc"][0])
        return Refusal(
            component.name,
            f"{slot.section}.{key}",
            f"{component.name} does not accept {given.get(key)!r}: {problem['msg']}",
            f"another {slot.section}.{key}",
            proposal.origin(slot.name, component.name),
        )
    chosen = chosen_of(component, options)
    proposal.chosen[slot.name] = (chosen,)
    return _against(proposal, slot, found, chosen)


def _against(proposal: Proposal, slot: Slot, found: Registration, chosen: Chosen) -> Refusal | None:
    """Return the first refusal of the candidate in the slot, or None.

    Refusals that also occur with the slot empty do not count.
    """
    for refusal in component_checks(proposal, slot, found.component, chosen):
        return refusal
    refusals = run_checks(proposal, slot.name)
    if refusals:
        proposal.chosen[slot.name] = ()
        before = set(run_checks(proposal, slot.name))
        proposal.chosen[slot.name] = (chosen,)
        refusals = [refusal for refusal in refusals if refusal not in before]
    return next(iter(refusals or unfit(proposal, slot, found.component, chosen)), None)


def unfit(proposal: Proposal, slot: Slot, component: Component, chosen: Chosen) -> list[Refusal]:
    """Return the refusals of a component's own check and of the libraries that its options name.

    Libraries are not checked if its own check refuses the component itself, because no library
    would help then.
    """
    own = own_check(proposal, slot, component, chosen)
    if any(refusal.field == use_field(proposal, slot, chosen) for refusal in own):
        return own
    return [*own, *provider_checks(proposal, slot, component, chosen)]


def own_check(
    proposal: Proposal, slot: Slot, component: Component, chosen: Chosen
) -> list[Refusal]:
    """Return the refusals of the component's own check.

    An exception in the check becomes a refusal that names the component's distribution.
    """
    if component.check is None:
        return []
    origin = proposal.origin(slot.name, chosen.name)
    try:
        return [
            Refusal(r.by, r.field, r.reason, r.fix, origin)
            for r in component.check(proposal.context(chosen.options))
        ]
    except Exception as error:
        reason = f"its check failed with {type(error).__name__}: {error}"
        fix = f"report it to {origin}; choose another component meanwhile"
        return [Refusal(chosen.name, slot.section or slot.name, reason, fix, origin)]


def _why(found: Registration, reasons: list[str]) -> str:
    """Return the reason for choosing a candidate.

    Args:
        reasons: reasons against the candidates before it.
    """
    return "; ".join(reasons) or found.component.summary or "first that fits"


def _nothing_fits(slot: Slot, failed: list[Refusal]) -> Refusal:
    """Return one refusal for a slot without a fitting candidate.

    Args:
        failed: the first refusal of each candidate.
    """
    if not failed:
        return Refusal(
            "choose",
            f"{slot.section}.use",
            f"no {slot.name} component is registered",
            "load a plugin that registers one (see glowplug plugins)",
        )
    if len(failed) == 1:
        return failed[0]
    # NOTE: a candidate refused because of an option (a dtype, a page size) fits after the option is
    # changed, so its fix is preferred. A fix that names another candidate is useless here if that
    # candidate does not fit either.
    use = f"{slot.section}.use"
    whole = [
        refusal
        for refusal in failed
        if not any(
            f'{use} = "{other.by}"' in refusal.fix for other in failed if other.by != refusal.by
        )
    ]
    best = next((refusal for refusal in failed if refusal.field != use), (whole or failed[-1:])[0])
    reason = "; ".join(refusal.reason for refusal in failed)
    return Refusal("choose", best.field, f"no {slot.name} component fits: {reason}", best.fix)


# ---- numbers that checks read --------------------------------------------------------------------


def _numbers(proposal: Proposal) -> None:
    """Decide width, lookahead, draft, mesh, ranks and hosts from the components chosen so far."""
    speculative = proposal.first("speculative")
    options: Any = speculative.options if speculative is not None else None
    drafts = isinstance(options, SpeculativeOptions)
    proposal.values.width = options.width() if drafts else 1
    proposal.values.lookahead = options.lookahead() if drafts else 0
    proposal.values.draft_folder = options.draft_folder() if drafts else None
    needs_layer = speculative is not None and getattr(speculative.offers, "nextn_layer", False)
    proposal.values.draft_layers = int(needs_layer)
    mesh: dict[str, int] = {}
    for chosen in proposal.chosen["parallel"]:
        assert isinstance(chosen.offers, ParallelOffers)
        for axis in sorted(chosen.offers.axes):
            mesh[axis] = getattr(chosen.options, "size", 1)
    proposal.values.mesh = mesh
    proposal.values.ranks = max(mesh.get("tp", 1) * mesh.get("pp", 1), mesh.get("world", 1), 1)
    proposal.values.hosts = _hosts(proposal)


def _hosts(proposal: Proposal) -> int:
    """Return the number of hosts: as given, else the fewest with enough devices or cores."""
    machine = proposal.facts.hardware
    asked: int | None = proposal.config.executor.hosts
    if asked is not None:
        return asked
    each = len(machine.devices) if proposal.values.device == "cuda" else machine.cpu_cores
    ranks: int = proposal.values.ranks
    return max(1, min(machine.hosts, -(-ranks // max(1, each))))


def _overlap(proposal: Proposal) -> None:
    """Decide whether steps overlap.

    By default they do on a device, where the host would wait otherwise, if all components allow it.
    """
    asked = proposal.config.scheduler.overlap
    beside = proposal.values.device != "cpu"
    wanted = beside if asked is None else asked
    waiting = [chosen.name for _, chosen in proposal.step_path() if not chosen.offers.overlap]
    overlap = proposal.values.overlap = wanted and not waiting
    source = proposal.source("scheduler.overlap")
    if source is not None and asked == overlap:
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
    proposal.decide("scheduler.overlap", overlap, by, why, notable=bool(waiting and wanted))


def unavailable(component: Component, packages: Mapping[str, str], machine: HardwareFacts) -> str:
    """Return the reason why a component cannot run on ``machine``; "" if it can.

    Missing packages are named only if their installation would help.

    Args:
        packages: version of each installed package by name.
    """
    if component.contract != CONTRACT:
        return f"written for contract {component.contract}, this is {CONTRACT}"
    offers = component.offers
    if "cpu" not in offers.devices:
        if not machine.devices:
            return "no GPU here"
        if "+cpu" in packages.get("torch", ""):
            return "torch is a CPU build"
        if not offers.runs_on({card.compute for card in machine.devices}):
            return f"not for {machine.devices[0].name}"
    missing = missing_packages(component, packages)
    return "; ".join(f"needs {requirement} ({found})" for requirement, found in missing)
