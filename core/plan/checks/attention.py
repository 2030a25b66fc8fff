"""Checks of the attention backend against model, KV cache and speculation. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.facts.kv_layout import DTYPE_BYTES, KVLayout, entry_faults
from glowplug.core.facts.mesh import divides
from glowplug.core.plan.checks.rules import instead, listed, reads, refuse
from glowplug.core.plan.checks.suggestions import suggestions
from glowplug.core.plan.kv_entries import kv_layers, planned_entries
from glowplug.core.plan.proposal import Proposal


@reads("attention", "model")
def check_attention_kind(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse attention of another kind (MLA or MHA) than the model's."""
    chosen = proposal.attention
    model = proposal.model
    if chosen is None or model is None:
        return
    kind = model.offers.kind
    if kind not in chosen.offers.kinds:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} computes {listed(chosen.offers.kinds)} attention, "
            f"{proposal.facts.model.architecture} needs {kind}",
            instead(
                proposal, "attention", lambda o: kind in o.kinds, f"a plugin with {kind} attention"
            ),
        )


@reads("attention")
def check_kv_dtype(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a KV cache dtype that the attention backend cannot read."""
    chosen = proposal.attention
    kv_dtype = proposal.values.kv_dtype
    if chosen is None:
        return
    if kv_dtype not in chosen.offers.kv_dtypes:
        kinds = chosen.offers.kinds
        other = suggestions(
            proposal, "attention", lambda o: kv_dtype in o.kv_dtypes and o.kinds == kinds
        )
        same_size = [
            dtype
            for dtype in sorted(chosen.offers.kv_dtypes)
            if DTYPE_BYTES.get(dtype) == DTYPE_BYTES.get(kv_dtype) == 1
        ]
        instead_of = " or ".join(f'"{dtype}"' for dtype in ["auto", *same_size])
        fix = f"attention.kv_dtype = {instead_of}" + (
            f', or attention.use = "{other[0]}"' if other else ""
        )
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} keeps the KV cache in "
            f"{listed(chosen.offers.kv_dtypes)}, not in {kv_dtype}",
            fix,
            field="attention.kv_dtype",
        )


@reads("attention", "speculative")
def check_kv_entries(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse declared KV entries from which no cache can be made."""
    chosen = proposal.attention
    if chosen is None or proposal.speculative is None:
        return
    kv_dtype = proposal.values.kv_dtype
    if kv_dtype not in chosen.offers.kv_dtypes or not divides(proposal.values.mesh):
        return  # refused by ``check_kv_dtype``, or by the checks of ranks
    layout = KVLayout(kv_layers(proposal), 1, planned_entries(proposal))
    for fault in entry_faults(layout):
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} declares KV entries of which no cache can be made: {fault}",
            f"another backend, or a version of {proposal.origin('attention', chosen.name)} whose "
            "AttentionOffers.kv_entries returns entries in the dtypes "
            f"{listed(DTYPE_BYTES)} for layers 0 to {layout.layers - 1}",
            field="attention.kv_dtype" if kv_dtype not in DTYPE_BYTES else "",
        )


@reads("attention")
def check_page_size(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a given page size that the attention backend cannot read."""
    chosen = proposal.attention
    size = proposal.config.attention.page_size
    if chosen is None or size is None:
        return
    if chosen.offers.page_sizes and size not in chosen.offers.page_sizes:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} reads pages of {listed(chosen.offers.page_sizes)} "
            f"tokens, not of {size}",
            f"attention.page_size = {min(chosen.offers.page_sizes)}",
            field="attention.page_size",
        )


@reads("attention", "speculative")
def check_width(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse an attention backend that cannot verify the drafted tokens of a row."""
    chosen = proposal.attention
    speculative = proposal.speculative
    if chosen is None or speculative is None:
        return
    width = proposal.values.width
    most = chosen.offers.max_width
    if most and width > most:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} supports {most} query tokens per row in decode, the "
            f"speculative algorithm computes {width}",
            instead(
                proposal,
                "attention",
                lambda o: not o.max_width or o.max_width >= width,
                "draft fewer tokens",
            ),
        )
    tree = speculative.offers.tree or proposal.values.draft_shape.is_tree
    if tree and not chosen.offers.tree:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} reads causal chains only, the drafted tokens form a tree",
            instead(proposal, "attention", lambda o: o.tree, "draft a chain (topk = 1)"),
        )


@reads("attention", "speculative")
def check_first_key(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse attention that reads every position of a draft's cache without a first entry.

    Some algorithms' drafts store no cache entry for the first token of a sequence.
    """
    chosen = proposal.attention
    speculative = proposal.speculative
    if chosen is None or speculative is None:
        return
    if speculative.offers.first_key and not chosen.offers.first_key:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} reads all positions of the cache, but that of {speculative.name}'s "
            "draft has no entry for the first token",
            instead(proposal, "attention", lambda o: o.first_key, 'speculative.use = "none"'),
        )
