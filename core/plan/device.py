"""Choice of the device and of the dtypes of computation and KV cache. Plan zone: no torch."""

from __future__ import annotations

from glowplug.core.errors import Refusal
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.offers import FLOAT_DTYPES
from glowplug.core.plugin.slots import SLOTS, Slot


def choose_device(proposal: Proposal) -> None:
    """Decide the device: as given, else "cuda" if the machine, torch and all slots allow it."""
    given = proposal.config.device
    if given != "auto":
        proposal.decisions.append(proposal.given("device", given))
        if given == "cuda":
            _require_cuda(proposal)
        proposal.values.device = given
        return
    machine = proposal.facts.hardware
    against = _against_cuda(proposal)
    device = "cpu" if against else "cuda"
    proposal.values.device = device
    proposal.decide(
        "device",
        device,
        "auto",
        against or f"{machine.name}: {machine.devices[0].name}",
        notable=device == "cpu" and bool(machine.devices),
    )


def _against_cuda(proposal: Proposal) -> str:
    """Return the reason why the device cannot be "cuda"; "" if it can."""
    machine = proposal.facts.hardware
    if not machine.devices:
        return f"{machine.name} has no CUDA device"
    if _cpu_torch(proposal):
        return "the installed torch is a CPU build"
    for slot in SLOTS:
        if slot.step and not _any_offers(proposal, slot, "cuda"):
            return f"no {slot.name} component offers cuda"
    return ""


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
    """Return whether any component that may fill the slot runs on ``device``."""
    named = [options.use for options in proposal.config.section(slot) if options.use != "auto"]
    return any(
        device in found.component.offers.devices
        for found in proposal.plugins.components(slot.name)
        if not named or found.component.name in named
    )


def choose_dtypes(proposal: Proposal) -> None:
    """Decide the compute dtype and the KV cache's dtype."""
    dtype, by, why = _dtype(proposal)
    proposal.values.dtype = dtype
    proposal.decide("dtype", dtype, by, why)
    path = "attention.kv_dtype"
    given = proposal.config.attention.kv_dtype
    proposal.values.kv_dtype = dtype if given == "auto" else given
    source = proposal.source(path) if given != "auto" else None
    by, why = source or ("auto", "the compute dtype")
    proposal.decide(path, proposal.values.kv_dtype, by, why)


def _dtype(proposal: Proposal) -> tuple[str, str, str]:
    """Return the compute dtype, and the fields ``by`` and ``why`` of its decision.

    The dtype is the given one, else it follows from device and checkpoint.
    """
    given = proposal.config.dtype
    checkpoint = proposal.facts.model.dtype
    if given != "auto":
        by, why = proposal.source("dtype") or ("default", "")
        return given, by, why
    if proposal.values.device == "cpu":
        return "float32", "auto", "exact, and bfloat16 is slow on most CPUs"
    if checkpoint in FLOAT_DTYPES:
        return checkpoint, "auto", "the checkpoint's"
    return "bfloat16", "auto", f"the checkpoint is {checkpoint}"
