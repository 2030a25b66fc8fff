"""The tensors of the KV cache, as the chosen attention backend declares them. No torch."""

from __future__ import annotations

from glowplug.core.errors import PluginLoadError
from glowplug.core.facts.kv_layout import USUAL_ENTRIES, KVContext, KVEntry, local_heads
from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.offers import ModelOffers


def own_cache_family(proposal: Proposal) -> str | None:
    """Return the model family that builds an EAGLE head with a KV cache of its own.

    Such a head has attention of another kind than the target, so its keys do not fit the target's
    cache. The target's family must build EAGLE heads of its own kind.

    Returns:
        Name of the head's family; None if the draft is no such head.
    """
    speculative = proposal.speculative
    target = proposal.model
    head = proposal.facts.draft
    if speculative is None or target is None or head is None:
        return None
    if not (speculative.offers.eagle_head and target.offers.eagle_architectures):
        return None
    if head.kind == target.offers.kind:
        return None
    for found in proposal.plugins.components("model"):
        offers = found.component.offers
        if isinstance(offers, ModelOffers) and offers.kind == head.kind:
            if head.architecture in offers.eagle_architectures:
                return found.component.name
    return None


def kv_layers(proposal: Proposal) -> int:
    """Return the number of layers in the KV pool: the model's, then those of a draft."""
    return int(proposal.facts.model.num_layers + proposal.values.draft_layers)


def planned_entries(proposal: Proposal) -> tuple[KVEntry, ...]:
    """Return the entries that ``AttentionOffers.kv_entries`` declares for this plan.

    A backend without a declaration, or of another kind than the model's (which is refused), has
    the usual entries of the model's kind.

    Raises:
        PluginLoadError: the function failed; the message names the plugin.
    """
    attention = proposal.attention
    assert attention is not None
    model = proposal.facts.model
    declared = attention.offers.kv_entries if model.kind in attention.offers.kinds else None
    heads = local_heads(model.num_kv_heads, axis_size("attn_tp", proposal.values.mesh))
    kept = proposal.values.kv_dtype
    context = KVContext(model, kept, heads, kv_layers(proposal), attention.options)
    if declared is None:
        return USUAL_ENTRIES[model.kind](context)
    try:
        return tuple(declared(context))
    except Exception as error:
        label = proposal.plugins.source_of("attention", attention.name).label
        raise PluginLoadError(
            f"plugin {label}: AttentionOffers.kv_entries of attention {attention.name} failed for "
            f"a cache in {kept}: {type(error).__name__}: {error}"
        ) from error
