"""Generic checks of drafts that are whole models. Plan zone: no torch.

``plan.draft_model`` applies the checks of models to the draft itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.checks.rules import instead, listed, reads, refuse
from glowplug.core.plan.checks.speculation import FOLDER, other_tokenizer
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.component import ChosenOf
from glowplug.core.plugin.offers import ModelOffers, SpeculativeOffers
from glowplug.core.plugin.speculative_options import SpeculativeOptions

SMALL = "a small model with the tokenizer of this one"
#: mesh axes with which a draft runs that is a whole model
AXES = frozenset({"tp"})

_Drafter = ChosenOf[SpeculativeOffers, SpeculativeOptions]


@reads("speculative", "model")
def check_whole_model(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse speculation that needs a whole model without a folder that holds a fitting one."""
    chosen = proposal.speculative
    if chosen is None or not chosen.offers.whole_model or proposal.drafts:
        return
    folder = proposal.facts.draft
    if folder is None:
        if not proposal.values.draft_folder:  # else reading it has been refused
            reason = f"{chosen.name} drafts with a small model, and no folder of one is given"
            fix = f"{FOLDER} = {SMALL}, or {_without(proposal)}"
            yield refuse(proposal, "speculative", chosen, reason, fix)
        return
    other = _other_draft(proposal, folder)
    if other is not None:
        yield refuse(proposal, "speculative", chosen, *other)
        return
    for reason, fix in _misfits(proposal, folder):
        yield refuse(proposal, "speculative", chosen, reason, fix, FOLDER)
    yield from other_tokenizer(proposal, chosen, folder, proposal.facts.model)
    yield from _context(proposal, chosen, folder)


def _without(proposal: Proposal) -> str:
    """Return the fix that turns speculation off."""
    return instead(proposal, "speculative", lambda o: not o.drafts, 'speculative.use = "none"')


def _other_draft(proposal: Proposal, folder: ModelFacts) -> tuple[str, str] | None:
    """Return reason and fix for a folder that is no whole model; None for a known one."""
    families = [
        offers
        for found in proposal.plugins.components("model")
        if isinstance(offers := found.component.offers, ModelOffers)
    ]
    name = folder.architecture
    what = f"{folder.path} is a {name}"
    if any(name in offers.architectures for offers in families):
        return None
    if any(name in offers.eagle_architectures for offers in families):
        fix = instead(proposal, "speculative", lambda o: o.eagle_head, f"{FOLDER} = {SMALL}")
        return f"{what}: an EAGLE head, which cannot run alone", fix
    if any(name in offers.draft_architectures for offers in families):
        fix = instead(proposal, "speculative", lambda o: o.nextn_layer, f"{FOLDER} = {SMALL}")
        return f"{what}: a next-token layer, which cannot run alone", fix
    known = listed({name for offers in families for name in offers.architectures})
    return f"no plugin builds the draft model: {what}", f"{FOLDER} = {SMALL}, one of {known}"


def _misfits(proposal: Proposal, folder: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield reasons and fixes for a draft of another vocabulary, or too wide for the ranks."""
    target = proposal.facts.model
    if folder.vocab_size != target.vocab_size:
        yield (
            f"the draft's vocabulary size is {folder.vocab_size}, the model's is "
            f"{target.vocab_size}",
            SMALL,
        )
    if proposal.values.ranks == 1:
        return
    collectives = proposal.collectives
    sized = collectives is not None and collectives.offers.buffer_bytes is not None
    if sized and folder.hidden_size > target.hidden_size:
        yield (
            f"the draft's hidden size is {folder.hidden_size}, and the buffers between ranks are "
            f"made for the model's, {target.hidden_size}",
            SMALL,
        )


def _context(proposal: Proposal, chosen: _Drafter, folder: ModelFacts) -> Iterator[Refusal]:
    """Refuse sequences that are longer than the draft's longest."""
    longest = proposal.config.context_length or proposal.facts.model.max_positions
    if folder.max_positions < longest:
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"the draft's longest sequence has {folder.max_positions} tokens, the engine's "
            f"{longest}",
            f"context_length = {folder.max_positions}",
            field="context_length",
        )


@reads("speculative", "parallel")
def check_whole_model_ranks(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse groups of ranks and divided experts beside a draft that is a whole model."""
    chosen = proposal.speculative
    if chosen is None or not chosen.offers.whole_model:
        return
    for place, strategy in enumerate(proposal.parallel):
        if strategy.offers.axes - AXES and strategy.options.size > 1:
            yield refuse(
                proposal,
                "speculative",
                chosen,
                f"{strategy.name} spreads tokens or experts over ranks, and the draft model of "
                f"{chosen.name} runs with tensor parallelism only",
                f"leave {strategy.name} out, or {_without(proposal)}",
                field=f"parallel.{place}.use",
            )
