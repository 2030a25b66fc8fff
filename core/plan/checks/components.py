"""Checks of one component against device, dtype and installed packages. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.plan.checks.contracts import since
from glowplug.core.plan.checks.rules import instead, listed, refuse
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.component import CONTRACT, Chosen, Component
from glowplug.core.plugin.requirements import installation, missing_packages
from glowplug.core.plugin.slots import Slot


def component_checks(
    proposal: Proposal, slot: Slot, component: Component, chosen: Chosen
) -> Iterator[Refusal]:
    """Refuse a component whose contract version, devices or dtypes do not fit the plan.

    A component is also refused if packages that it requires are missing.
    """
    changes = since(component.contract, slot.name)
    if changes:
        yield refuse(
            proposal,
            slot.name,
            chosen,
            f"{component.name} was written for contract {component.contract}, this "
            f"is contract {CONTRACT}",
            f"install a version of {proposal.origin(slot.name, component.name)} made "
            f"for this release of glowplug; its author has to change: {'; '.join(changes)}; "
            f"and to state contract={CONTRACT} (docs/contracts.md)",
        )
    device = _device(proposal, slot, chosen)
    if device is not None:
        yield device
    dtype = _dtype(proposal, slot, chosen)
    if dtype is not None:
        yield dtype
    # a component that cannot run here would not be helped by installing packages
    if component.requires and device is None:
        yield from _packages(proposal, slot, component, chosen)


def _packages(
    proposal: Proposal, slot: Slot, component: Component, chosen: Chosen
) -> Iterator[Refusal]:
    """Refuse a component if packages that it requires are missing."""
    for requirement, found in missing_packages(component, proposal.facts.software.packages):
        yield refuse(
            proposal,
            slot.name,
            chosen,
            f"{component.name} needs {requirement} ({found})",
            installation(requirement, proposal.facts.hardware),
        )


def provider_checks(
    proposal: Proposal, slot: Slot, component: Component, chosen: Chosen
) -> Iterator[Refusal]:
    """Refuse missing libraries that a component's options choose for GEMMs on CUDA."""
    if proposal.values.device != "cuda" or not component.uses:
        return
    for name in chosen.options.provider_fields():
        value = getattr(chosen.options, name)
        needed = component.uses.get(value, ())
        if needed and not any(proposal.facts.software.packages.get(package) for package in needed):
            key = f"{slot.name}.{name}"
            yield Refusal(
                component.name,
                key,
                f'{key} = "{value}" needs {" or ".join(needed)} (not installed)',
                f'{installation(needed[0], proposal.facts.hardware)} (or {key} = "auto")',
            )


def _device(proposal: Proposal, slot: Slot, chosen: Chosen) -> Refusal | None:
    """Refuse a component that does not run on the plan's device or its compute capability."""
    offers = chosen.offers
    device = proposal.values.device
    machine = proposal.facts.hardware
    if device not in offers.devices:
        return refuse(
            proposal,
            slot.name,
            chosen,
            f"{chosen.name} runs on {listed(offers.devices)}, the device is {device}",
            instead(proposal, slot.name, lambda o: True, f'device = "{min(offers.devices)}"'),
        )
    if device == "cuda" and (offers.compute or offers.least_compute):
        cards = {card.compute for card in machine.devices}
        if not offers.runs_on(cards):
            supported = listed(offers.compute) or f"{offers.least_compute} and later"
            return refuse(
                proposal,
                slot.name,
                chosen,
                f"{chosen.name} supports SM{supported}; {machine.name} has SM{listed(cards)}",
                instead(proposal, slot.name, lambda o: True, "another device"),
            )
    return None


def _dtype(proposal: Proposal, slot: Slot, chosen: Chosen) -> Refusal | None:
    """Refuse a component that does not support the compute dtype."""
    dtypes = chosen.offers.dtypes
    dtype = proposal.values.dtype
    if not slot.step or dtype in dtypes:
        return None
    return refuse(
        proposal,
        slot.name,
        chosen,
        f"{chosen.name} computes in {listed(dtypes)}, the dtype is {dtype}",
        f'dtype = "{min(dtypes)}"',
        field="dtype",
    )
