"""Bytes of weights on each rank, from the axis that splits each class. Plan zone: no torch.

The strategies' ``shard`` splits the tensors themselves. This module does the same arithmetic on
sums, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glowplug.core.facts.mesh import axis_size, coordinates, deal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.weight_classes import (
    EXPERTS,
    HEADS,
    KV_HEADS,
    KV_UP,
    ROUTER,
    SHARED,
    TARGET,
    TIED,
    VOCAB,
    WIDTH,
    Tally,
    WeightKind,
)

#: roles that schemes quantise while loading
QUANTISED = frozenset({HEADS, KV_HEADS, KV_UP, WIDTH, SHARED, EXPERTS})


@dataclass(frozen=True)
class Storage:
    """The form in which loaded weights are kept.

    Attributes:
        compute: bytes of an element in the compute dtype.
        keeps: quantised weights stay quantised.
        copies_latent: a second copy of the latent's up-projection is kept (a CPU lays it out for
            absorption).
    """

    compute: int
    keeps: bool
    copies_latent: bool


def weights_by_rank(
    tally: Tally,
    model: ModelFacts,
    mesh: Mapping[str, int],
    ranks: int,
    storage: Storage,
    drafts: int = 0,
    redundant: int = 0,
) -> tuple[int, ...]:
    """Return the bytes of weights on each rank.

    Args:
        tally: number of elements by kind.
        drafts: number of next-token layers to count instead of the target; 0: the target.
        redundant: number of copies of experts that each layer has beside its routed experts.
    """
    wanted = _wanted(tally, drafts, model.n_routed_experts, redundant)
    exchange = "ep" in mesh  # the shared expert is then split within a dp group
    even = sum(
        _part(count * number_bytes(kind, storage), parts_of(kind.role, model, mesh, exchange))
        for kind, count in wanted.items()
        if kind.role not in (VOCAB, TIED)
    )
    rows: dict[WeightKind, float] = {}  # bytes of one row of the vocabulary in all tables
    for kind, count in wanted.items():
        if kind.role in (VOCAB, TIED):
            rows[kind] = count // model.vocab_size * number_bytes(kind, storage)
    row = int(sum(rows.values()))
    held = vocabulary_rows(model.vocab_size, mesh, ranks)
    return tuple(even + row * count for count in held)


def _wanted(tally: Tally, drafts: int, experts: int, redundant: int) -> Tally:
    """Return the numbers of elements of the target or its draft, with redundant experts.

    Args:
        drafts: number of next-token layers to count instead of the target; 0: the target.
        experts: number of routed experts of a layer.
        redundant: number of copies that a layer has beside them.
    """
    counted = range(drafts) if drafts else (TARGET,)
    wanted = {kind: count for kind, count in tally.items() if kind.draft in counted}
    for kind, count in wanted.items():
        if kind.role == EXPERTS:
            wanted[kind] = count // experts * (experts + redundant)
    return wanted


def number_bytes(kind: WeightKind, storage: Storage) -> float:
    """Return the bytes of one element of the class ``kind`` after loading."""
    if kind.scale:
        return kind.kept if storage.keeps else 0
    kept = kind.kept if kind.kept and storage.keeps else storage.compute
    if kind.role == ROUTER:
        return 4
    if kind.role == TIED:
        return 2 * kept
    if kind.role == KV_UP:
        return kept + storage.compute * (storage.copies_latent + (kept != storage.compute))
    return kept


def parts_of(role: str, model: ModelFacts, mesh: Mapping[str, int], exchange: bool) -> int:
    """Return the number of ranks among which tensors of a role are split; 1 for whole tensors.

    For tensors of the vocabulary see ``vocabulary_rows``.

    Args:
        role: a role in ``weight_classes``.
        model: facts of the model.
        mesh: mesh axis -> size.
        exchange: the mesh has an "ep" axis.
    """
    tp = axis_size("tp", mesh)
    attention = axis_size("attn_tp", mesh)
    if role in (HEADS, KV_UP):
        return attention
    if role == KV_HEADS:
        return min(attention, model.num_kv_heads)
    if role == SHARED:
        return attention if exchange else tp
    return tp if role in (WIDTH, EXPERTS) else 1  # experts: ep blocks with moe_tp slices each


def vocabulary_rows(vocab: int, mesh: Mapping[str, int], ranks: int) -> list[int]:
    """Return the number of rows that each of the ranks holds of the embedding and of the head.

    All ranks hold the same number of rows, except that the last ones of a dp group may hold fewer.
    """
    parts = axis_size("attn_tp", mesh)
    counts = [deal(vocab, parts, part)[1] for part in range(parts)]
    if counts[0] == counts[-1]:
        return counts[:1] * ranks
    return [counts[coordinates(rank, mesh).get("attn_tp", 0)] for rank in range(ranks)]


def _part(total: float, parts: int) -> int:
    return -int(-total // parts)
