"""Changes between contracts, by slot: what an author has to change in a component. No torch.

A component is refused if its slot has changed since the contract that it was written for.
``docs/contracts.md`` has the same changes with examples.
"""

from __future__ import annotations

from glowplug.core.plugin.component import CONTRACT

#: contract -> slot -> changes that make components of the former contract wrong
CHANGES: dict[int, dict[str, str]] = {
    2: {
        "attention": "AttentionOffers.kv_entries receives one KVContext in place of (facts, dtype, "
        "heads), and kv_layout() returns plan.kv_layout(entries, options)",
        "quantization": "QuantizationScheme.covers receives (module, rows, columns), and the "
        "slices of weights are in core.layers.slices",
        "model": "MhaAttention is in core.layers.mha, and BuildContext.scheme_for receives "
        "(module, rows, columns)",
        "outputs": "OutputParserFactory.start and ReasoningParserFactory.reasoning receive one "
        "OutputRequest in place of (prompt_tail, thinking)",
    },
}


def since(contract: int | None, slot: str) -> list[str]:
    """Return the changes of a slot since a contract; a later contract is one change."""
    written = contract or 1
    if written == CONTRACT:
        return []
    if written > CONTRACT:
        return [f"this release has contract {CONTRACT}"]
    return [
        CHANGES[number][slot]
        for number in range(written + 1, CONTRACT + 1)
        if slot in CHANGES.get(number, {})
    ]
