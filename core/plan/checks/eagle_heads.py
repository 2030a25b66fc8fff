"""Generic checks of folders with EAGLE heads. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.checks.rules import instead, listed, reads, refuse
from glowplug.core.plan.checks.speculation import FOLDER, HEADS
from glowplug.core.plan.kv_entries import own_cache_family
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.offers import ModelOffers


@reads("speculative", "model")
def check_eagle_head(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse speculation that needs an EAGLE head without a folder that holds a fitting one."""
    chosen = proposal.speculative
    model = proposal.model
    if chosen is None or model is None or not chosen.offers.eagle_head or proposal.drafts:
        return
    folder = proposal.facts.draft
    if not model.offers.eagle_architectures:
        reason = f"{chosen.name} needs an EAGLE head, which {model.name} does not build"
        yield refuse(proposal, "speculative", chosen, reason, _without(proposal))
    elif folder is not None:
        found = _misfit(proposal, model.offers, folder)
        if found is not None:
            yield refuse(proposal, "speculative", chosen, *found)
    elif not proposal.values.draft_folder:  # else reading it has been refused
        reason = f"{chosen.name} drafts with an EAGLE head, and no folder of one is given"
        fix = f"{FOLDER} = a folder with {HEADS}, or {_without(proposal)}"
        yield refuse(proposal, "speculative", chosen, reason, fix)


def _without(proposal: Proposal) -> str:
    """Return the fix that turns speculation off."""
    return instead(proposal, "speculative", lambda o: not o.drafts, 'speculative.use = "none"')


def _misfit(
    proposal: Proposal, family: ModelOffers, folder: ModelFacts
) -> tuple[str, str, str] | None:
    """Return reason, fix and field for a folder without a fitting head; None for a fitting one."""
    target = proposal.facts.model.architecture
    what = f"{folder.path} is a {folder.architecture}"
    fits = family.eagle_architectures
    if folder.architecture in family.draft_architectures | family.architectures:
        fix = instead(proposal, "speculative", lambda o: o.nextn_layer, f"{FOLDER} = {HEADS}")
        return f"{what}, not an EAGLE head", fix, ""
    if own_cache_family(proposal) is not None:
        return None
    if folder.kind != family.kind:
        return (
            f"{what} with {folder.kind} attention, for which no plugin builds a head; its keys do "
            f"not fit the KV cache of {target}, which is {family.kind}",
            f"a head with {family.kind} attention: {listed(fits)}",
            FOLDER,
        )
    if folder.architecture not in fits:
        return f"{what}, not an EAGLE head for {target}", f"a folder of {listed(fits)}", FOLDER
    return None
