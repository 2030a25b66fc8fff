"""What prefill holds beside its queries: the byte budget's view of ``paged_mla`` and ``paged_mha``.
No torch.
"""

from __future__ import annotations

from glowplug.core.plugin.byte_costs import SHOWN, AttentionStep

EXPANDED_BYTES = 256 << 20  #: keys and values that one call expands from cached latents


def most_keys(heads: int, key: int, value: int, element: int) -> int:
    """Cached keys that one call of latent attention expands: of the model's ``heads`` with numbers
    of ``element`` bytes."""
    return max(256, EXPANDED_BYTES // (heads * _expanded(key, value) * element))


def _expanded(key: int, value: int) -> int:
    """Numbers of a head's key and value, which are equally wide in memory: see
    ``kernels.mla.expand``.
    """
    return 2 * max(key, value)


def mla_bytes(step: AttentionStep) -> int:
    """The output and the tokens' own cache entries, and what the largest call takes: see
    ``PagedMla._ragged``.
    """
    entry = step.entry * step.element
    expanded = step.heads * _expanded(step.key, step.value) * step.element
    lse = step.heads * SHOWN
    value = step.heads * step.value
    kept = step.tokens * (entry + value * step.element)
    whole = step.longest + step.cached
    if not step.cached:
        call = step.tokens * (expanded + lse)
    elif whole <= (at_once := most_keys(step.all_heads, step.key, step.value, step.element)):
        call = whole * (entry + expanded) + step.longest * lse
    else:
        pieces = -(-step.cached // at_once)
        merged = step.longest * (value * (SHOWN + step.element) + 2 * lse)
        call = max(
            step.longest * (expanded + lse), merged + -(-step.cached // pieces) * (entry + expanded)
        )
    return kept + call


def mha_bytes(step: AttentionStep) -> int:
    """The output: keys and values are read as the cache holds them."""
    return step.tokens * step.heads * step.value * step.element
