"""The choices of a model's gates, position by position, and their distance from another choice.

Two computations of one model round differently, and where two experts have nearly the same score
they may choose different ones: the logits of that position then differ by far more than rounding.
``Watch`` records every choice of a run with its scores, or makes a run follow another one's
choices; ``flips`` distinguishes ties from errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.core.engine.runner import Runner
from glowplug.core.layers.gate import Gate, MoeSizes
from glowplug.core.layers.moe import Moe
from glowplug.core.step.batch import Batch

Key = tuple[int, int]
EXACT = 1e-6  #: of a score: float32 sums in another order


@dataclass
class Chosen:
    """The choices of one gate by position: experts int64 [T, K] in ascending order, and the scores
    that decided, float32 [T, E].
    """

    sizes: MoeSizes
    keys: list[Key] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def sorted(self) -> tuple[list[Key], Tensor, Tensor]:
        order = sorted(range(len(self.keys)), key=self.keys.__getitem__)
        at = torch.tensor(order, device=self.experts[0].device)
        return (
            [self.keys[i] for i in order],
            torch.cat(self.experts)[at],
            torch.cat(self.scores)[at],
        )


Choices = dict[str, Chosen]  #: by the gate's name


class Watch:
    """Adds to ``choices`` in every eager step of ``runner`` from now on; replayed steps are not
    seen.

    ``forced`` are another run's choices, which the gates follow with weights of their own scores.
    """

    def __init__(self, runner: Runner, forced: Choices | None = None) -> None:
        self.choices: Choices = {}
        self._runner, self._keys = runner, list[Key]()
        self._forced = {name: _by_key(chosen) for name, chosen in (forced or {}).items()}
        self._forward, runner._forward = runner._forward, self._step  # type: ignore[method-assign]
        for gate in gates(runner.model):
            self._watch(gate)

    def _step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self._keys = list(self._keys_of(batch))
        try:
            return self._forward(batch)
        finally:
            self._keys = []

    def _keys_of(self, batch: Batch) -> Iterator[Key]:
        """Yield for each token the sequence's number, which is its seed, and the position that the
        token predicts.
        """
        for row, queries, length in zip(
            batch.rows.tolist(), batch.query_lens.tolist(), batch.kv_lens.tolist()
        ):
            sequence = self._runner.table.sequences[row]
            assert sequence is not None and sequence.params.seed is not None
            yield from (
                (sequence.params.seed, at) for at in range(length - queries + 1, length + 1)
            )

    def _watch(self, gate: Gate) -> None:
        plain, kept = gate.forward, self.choices.setdefault(gate.name, Chosen(gate.sizes))

        def forward(x: Tensor, ready: Tensor | None = None) -> tuple[Tensor, Tensor]:
            weights, ids = plain(
                x, ready
            )  # also where its choice is not followed: experts started early wait for it
            if not self._keys:
                return weights, ids
            scores, choice = scores_of(gate, x)
            forced = self._forced.get(gate.name)
            if forced is not None:
                weights, ids = _weighted(
                    gate, scores, torch.stack([forced[key] for key in self._keys])
                )
            kept.keys += self._keys
            kept.experts.append(ids[:, : gate.sizes.topk].long().sort(-1).values)
            kept.scores.append(choice)
            return weights, ids

        gate.forward = forward  # type: ignore[method-assign]


def gates(model: Any) -> list[Gate]:
    return [
        layer.feed_forward.gate for layer in model.layers if isinstance(layer.feed_forward, Moe)
    ]


def _by_key(chosen: Chosen) -> dict[Key, Tensor]:
    keys, experts, _ = chosen.sorted()
    return dict(zip(keys, experts, strict=True))


def scores_of(gate: Gate, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 [T, E] scores of x [T, H] that weight the experts, and those that choose
    them.
    """
    logits = F.linear(x.float(), gate.weight.float())
    if gate.bias is None:
        scores = logits.softmax(-1)
        return scores, scores
    scores = logits.sigmoid()
    return scores, scores + gate.bias


def _weighted(gate: Gate, scores: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return a gate's result for the choice ``experts`` int64 [T, K]."""
    sizes, fused_shared = gate.sizes, gate.fused_shared
    weights = scores.gather(1, experts)
    if sizes.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    behind = torch.arange(
        sizes.experts, sizes.experts + fused_shared, device=experts.device
    ).expand(len(experts), -1)
    ids = torch.cat([experts, behind], 1)
    weights = torch.cat([weights * sizes.scale, torch.ones_like(behind, dtype=torch.float32)], 1)
    return weights, ids if gate._route is None else ids.to(torch.int32)


def gap(scores: Tensor, sizes: MoeSizes) -> Tensor:
    """Return float32 [T]: how much two of the scores [T, E] have to move towards each other for
    another choice; of groups, whose best two count in a sigmoid gate, half as much as their
    sums.
    """
    found = torch.full_like(scores[:, 0], float("inf"))
    if sizes.topk_groups < sizes.groups:
        by_group = scores.view(len(scores), sizes.groups, -1)
        groups = by_group.topk(2, -1).values.sum(-1) if sizes.sigmoid else by_group.amax(-1)
        order = groups.sort(-1, descending=True)
        found = order.values[:, sizes.topk_groups - 1] - order.values[:, sizes.topk_groups]
        found = found / 2 if sizes.sigmoid else found
        out = torch.ones_like(groups, dtype=torch.bool).scatter_(
            1, order.indices[:, : sizes.topk_groups], False
        )
        scores = by_group.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)
    best = scores.topk(sizes.topk + 1, -1).values
    return torch.minimum(found, best[:, -2] - best[:, -1])


@dataclass(frozen=True)
class Flips:
    """Positions at which a gate chose other experts than the reference's.

    Attributes:
        gap_median: Median ``gap`` of the reference's scores at flipped positions.
        gap_max: Largest such gap.
        gap_of_all: Median gap of all positions.
        change: Median over all positions of the largest change of a score.
        unexplained: Flips whose gap was wider than the scores' own change can close; a correct gate
            has none.
    """

    positions: int
    flipped: int
    gap_median: float
    gap_max: float
    gap_of_all: float
    change: float
    unexplained: int


def flips(want: Choices, got: Choices) -> tuple[Flips, set[Key]]:
    """Return the report, and the positions at which some gate flipped."""
    positions, columns, flipped_keys = 0, list[Tensor](), set[Key]()
    for name, chosen in want.items():
        (keys, experts, scores), (others, other_experts, other_scores) = (
            chosen.sorted(),
            got[name].sorted(),
        )
        assert keys == others, "both runs hold the same positions"
        flipped = (experts != other_experts).any(-1)
        change = (scores - other_scores).abs().amax(-1)
        columns.append(torch.stack([flipped.float(), gap(scores, chosen.sizes), change]))
        flipped_keys |= {key for key, far in zip(keys, flipped.tolist(), strict=True) if far}
        positions = len(keys)
    far, gaps, change = torch.cat(columns, 1).cpu()
    flipped = far > 0
    theirs = gaps[flipped] if bool(flipped.any()) else torch.zeros(1)
    wide = flipped & (gaps > 2 * change + EXACT)
    return Flips(
        positions,
        len(flipped_keys),
        float(theirs.median()),
        float(theirs.max()),
        float(gaps.median()),
        float(change.median()),
        int(wide.sum()),
    ), flipped_keys
