"""Bytes of weights on each rank: which axis splits which class of tensors. Plan zone: no torch.

The strategies' ``shard`` is what really happens; this is the same arithmetic on sums, and a test
compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glowplug.core.facts.mesh import axis_size, coordinates, deal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.weight_classes import (
    EXPERTS,
    HEADS,
    INT4,
    KV_HEADS,
    KV_UP,
    ROUTER,
    SCALE,
    SHARED,
    TIED,
    VOCAB,
    WIDTH,
    Kind,
    Tally,
)

EIGHT_BIT = frozenset({"float8_e4m3fn", "float8_e5m2", "int8"})
QUANTISED = frozenset(
    {HEADS, KV_HEADS, KV_UP, WIDTH, SHARED, EXPERTS}
)  #: by schemes that quantise while loading
SCALE_BYTES = 4
HALF_BYTES = 2  #: of a scale or zero of 4-bit weights


@dataclass(frozen=True)
class Storage:
    """How loaded weights are kept: bytes of a number in the compute dtype; whether quantised
    weights stay as narrow; whether the latent's up-projection is copied once more (a CPU lays it
    out for absorption); ``online``: bytes of a number that is quantised while loading (0: none is).
    The latents' projections then count as if they were not.
    """

    compute: int
    keeps: bool
    copies_latent: bool
    online: int = 0


def weights_by_rank(
    tally: Tally,
    model: ModelFacts,
    mesh: Mapping[str, int],
    ranks: int,
    storage: Storage,
    drafts: bool,
) -> tuple[int, ...]:
    """Bytes on each rank of the target's weights, or (``drafts``) of its first next-token layer."""
    wanted = {kind: count for kind, count in tally.items() if kind.draft == (0 if drafts else -1)}
    exchange = "ep" in mesh  # the shared expert then stays within a group
    even = sum(
        _part(count * number_bytes(kind, storage), parts_of(kind.role, model, mesh, exchange))
        for kind, count in wanted.items()
        if kind.role not in (VOCAB, TIED)
    )
    rows: dict[Kind, float] = {}  # bytes of one row of the vocabulary, over all its tables
    for kind, count in wanted.items():
        if kind.role in (VOCAB, TIED):
            rows[kind] = count // model.vocab_size * number_bytes(kind, storage)
    row = sum(rows.values())
    return tuple(
        even + int(row) * vocabulary_rows(model.vocab_size, mesh, rank) for rank in range(ranks)
    )


def number_bytes(kind: Kind, storage: Storage) -> float:
    """Bytes that one number of a class takes once loaded."""
    if kind.scale:
        return (SCALE_BYTES if kind.dtype == SCALE else HALF_BYTES) if storage.keeps else 0
    narrow = 0.5 if kind.dtype == INT4 else 1
    kept = (
        narrow
        if (kind.dtype in EIGHT_BIT or kind.dtype == INT4) and storage.keeps
        else storage.compute
    )
    if storage.online and storage.keeps and kind.role in QUANTISED:
        kept = storage.online
    if kind.role == ROUTER:
        return 4
    if kind.role == TIED:
        return 2 * kept
    if kind.role == KV_UP and (storage.copies_latent or kept != storage.compute):
        return kept + storage.compute
    return kept


def parts_of(role: str, model: ModelFacts, mesh: Mapping[str, int], exchange: bool) -> int:
    """Ranks that share one copy of a class; the vocabulary is dealt by rows instead."""
    tp = axis_size("tp", mesh)
    attention = axis_size("attn_tp", mesh)
    if role in (HEADS, KV_UP):
        return attention
    if role == KV_HEADS:
        return min(attention, model.num_kv_heads)
    if role == SHARED:
        return attention if exchange else tp
    return tp if role in (WIDTH, EXPERTS) else 1  # experts: ep blocks of moe_tp slices each


def vocabulary_rows(vocab: int, mesh: Mapping[str, int], rank: int) -> int:
    """Rows of embedding and head on a rank: equal slices, the last ones shorter."""
    return deal(vocab, axis_size("attn_tp", mesh), coordinates(rank, mesh).get("attn_tp", 0))[1]


def _part(total: float, parts: int) -> int:
    return -int(-total // parts)
