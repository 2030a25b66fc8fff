"""The tensors of the KV cache, as the chosen attention backend declares them. No torch."""

from __future__ import annotations

from glowplug.core.errors import PluginLoadError
from glowplug.core.facts.kv_layout import USUAL_ENTRIES, KVContext, KVEntry, local_heads
from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.proposal import Proposal


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
