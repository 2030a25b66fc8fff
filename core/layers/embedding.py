"""Token embedding, and the output head that computes the logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from glowplug.core.layers.linear import Linear, Part
from glowplug.core.layers.module import Module, Target, part_of
from glowplug.core.protocols import VocabularySlices, WeightTarget
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.to_device import rows_at


class Embedding(Module):
    """The token embedding ``{name}.weight`` [vocab, hidden]; ranks may hold a slice of its rows."""

    def __init__(self, context: BuildContext, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.vocab = vocab
        self._shard = context.parallel.shard("vocab", name, vocab)
        self._collectives = context.collectives
        self.weight = torch.empty(
            self._shard.size, hidden, dtype=context.dtype, device=context.worker.device
        )

    def own_targets(self) -> Iterator[WeightTarget]:
        """Yield the target of this rank's rows."""
        shard = self._shard
        hidden = self.weight.shape[1]
        yield Target(
            f"{self.name}.weight",
            (self.vocab, hidden),
            self.weight,
            (part_of(shard.start, shard.size, shard.full), slice(None)),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of token ids int64 [T]."""
        shard = self._shard
        if shard.size == shard.full:
            return rows_at(self.weight, ids)
        # NOTE: every operation is a kernel launch. Two comparisons, and masks applied to copies,
        # took 16 us of a decode step with 8 rows
        wanted = ids - shard.start
        local = wanted.clamp(0, shard.size - 1)
        rows = rows_at(self.weight, local).masked_fill_((local != wanted).unsqueeze(1), 0)
        return self._collectives.all_reduce(rows, shard.axis)


class LmHead(Module):
    """The output head: float32 logits [N, vocab] of hidden states [N, hidden].

    Attributes:
        linear: the layer with this rank's rows of the weight.
        shard: these rows.
        slices: the division of the vocabulary among ranks; None if a rank has all rows.
    """

    def __init__(self, context: BuildContext, name: str, vocab: int, hidden: int) -> None:
        self.linear = Linear(context, name, hidden, [Part(name, vocab, "vocab")], wide=True)
        self.shard = self.linear.shards[0]
        self.slices: VocabularySlices | None = None
        if self.shard.size < vocab:
            self.slices = VocabularySlices(self.shard, context.collectives)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [N, vocab] of hidden states [N, hidden]."""
        logits = self.sliced_logits(hidden)
        return logits if self.slices is None else self.slices.gather(logits)

    def sliced_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [N, size] of this rank's slice, of hidden states [N, hidden]."""
        return self.linear.forward(hidden).float()


class TiedHead(LmHead):
    """A head whose weight is the embedding's.

    NOTE: the head keeps a copy in the layout of its linear method. The logits read all of it in
    every step, and a row-major embedding takes twice the time on a CPU.
    """

    def __init__(self, context: BuildContext, name: str, embedding: Embedding) -> None:
        super().__init__(context, name, embedding.vocab, embedding.weight.shape[1])
        self._embedding = [embedding.weight]

    def targets(self) -> Iterator[WeightTarget]:
        """Yield nothing: the embedding's target loads the weight."""
        return iter(())

    def finalize(self) -> None:
        """Copy the loaded embedding into the head's weight, in its linear method's layout."""
        for target in self.linear.targets():
            target.store(self._embedding[0])
        super().finalize()
