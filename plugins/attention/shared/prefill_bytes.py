"""Prefill memory of attention beside its queries, for the byte budget.

The formulas follow ``expanded_prefill.ExpandedPrefill`` and ``mha_base.PagedMha``. This module
imports no torch.
"""

from __future__ import annotations

from glowplug.core.plugin.byte_costs import NUMBER_BYTES, AttentionStep

EXPANDED_BYTES = 256 << 20  #: bytes of keys and values that one call expands from cached latents


def most_keys(heads: int, key: int, value: int, element: int) -> int:
    """Return the largest number of cached keys that one latent-attention call expands.

    Args:
        heads: Number of heads of the model, over all ranks.
        key: Number of elements of a head's key.
        value: Number of elements of a head's value.
        element: Bytes of an element.
    """
    return max(256, EXPANDED_BYTES // (heads * _expanded(key, value) * element))


def _expanded(key: int, value: int) -> int:
    """Return the number of elements that a head's key and value take once expanded from a latent.

    Key and value are padded to the same width, see ``kernels.mla.expand``.
    """
    return 2 * max(key, value)


def mla_bytes(step: AttentionStep) -> int:
    """Return the peak bytes of latent attention in the prefill ``step``, beside its queries.

    They are the sum of the output, the tokens' own cache entries and the memory of the largest
    call (``ExpandedPrefill.attend_rows``).
    """
    entry = step.entry * step.element
    expanded = step.heads * _expanded(step.key, step.value) * step.element
    lse = step.heads * NUMBER_BYTES
    value = step.heads * step.value
    kept = step.tokens * (entry + value * step.element)
    whole = step.longest + step.cached
    if not step.cached:
        call = step.tokens * (expanded + lse)
    elif whole <= (at_once := most_keys(step.all_heads, step.key, step.value, step.element)):
        call = whole * (entry + expanded) + step.longest * lse
    else:
        pieces = -(-step.cached // at_once)
        merged = step.longest * (value * (NUMBER_BYTES + step.element) + 2 * lse)
        call = max(
            step.longest * (expanded + lse), merged + -(-step.cached // pieces) * (entry + expanded)
        )
    return kept + call


def mha_bytes(step: AttentionStep) -> int:
    """Return the bytes of multi-head attention in the prefill ``step``: those of its output.

    Keys and values need no memory here: they are read directly from the cache.
    """
    return step.tokens * step.heads * step.value * step.element
