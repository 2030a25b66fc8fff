"""Choice and check of ``scheduler.last_layer``. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.plan.checks.rules import reads
from glowplug.core.plan.proposal import Proposal

FIELD = "scheduler.last_layer"


def choose_last_layer(proposal: Proposal) -> None:
    """Decide which tokens of prompts go through the last layer.

    With "auto", a GPU computes only the tokens whose logits are sampled, if possible; a CPU
    computes all tokens, because its results are the reference for GPUs.
    """
    given = proposal.config.scheduler.last_layer
    source = proposal.source(FIELD)
    needed = _needs_all(proposal)
    on_cpu = proposal.values.device == "cpu"
    proposal.values.sampled_last_layer = not needed and (
        given == "sampled" or given == "auto" and not on_cpu
    )
    if given != "auto" and source is not None:
        proposal.decide(FIELD, given, *source)
    elif not on_cpu:
        proposal.decide(
            FIELD,
            "all" if needed else "sampled",
            "auto",
            needed or "of prompts only tokens sampled from go through it; the others are cached",
        )


@reads("model", "speculative", "parallel")
def check_last_layer(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse the setting "sampled" if all tokens must go through the last layer."""
    needed = _needs_all(proposal) if proposal.config.scheduler.last_layer == "sampled" else ""
    if needed:
        yield Refusal("model", FIELD, needed, f'{FIELD} = "all", or leave it out')


def _needs_all(proposal: Proposal) -> str:
    """Return the reason why all tokens must go through the last layer; "" if there is none."""
    model = proposal.model
    if model is not None and not model.offers.sampled_last_layer:
        return f"{model.name}'s last layer computes all tokens of a step"
    if proposal.values.width > 1:
        return "drafts read the hidden states of all tokens"
    return "ranks exchange all tokens of a step" if proposal.exchanges else ""
