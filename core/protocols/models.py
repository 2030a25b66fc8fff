"""Protocols of models and model families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from glowplug.core.protocols.parallel import Collectives, Shard
from glowplug.core.protocols.weights import WeightTarget
from glowplug.core.step.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.protocols.build_context import BuildContext


class Model(Protocol):
    """A built model: its forward pass, and the checkpoint tensors to be loaded into it."""

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run the model over the tokens of a step and fill their KV cache.

        Args:
            input_ids: token ids, int64 [T].
            positions: position of each token in its sequence, int64 [T].
            batch: the step.

        Returns:
            Final hidden states after the last norm, [T, hidden].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Multiply hidden states by the output head.

        Args:
            hidden: final hidden states, [N, hidden].

        Returns:
            Logits, float32 [N, V].
        """
        ...

    def targets(self) -> Iterator[WeightTarget]:
        """Yield a target for every checkpoint tensor to be loaded."""
        ...

    def finalize(self) -> None:
        """Finish the model once every tensor is loaded: call ``finalize`` of its layers."""
        ...

    def ignored(self, name: str) -> bool:
        """Return whether a checkpoint tensor without a target may be left unread.

        Such tensors are those of a NextN layer that is not used, or rotary tables, for example.
        """
        ...


@dataclass(frozen=True, eq=False)
class VocabularySlices:
    """The division of logits among ranks: each rank computes those of a slice of the vocabulary.

    The slices follow each other in order of rank; the last one may be shorter.

    Attributes:
        shard: this rank's slice.
        collectives: the collectives of the ranks.
    """

    shard: Shard
    collectives: Collectives

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks, [N, V].

        Args:
            logits: those of this rank's slice, [N, size].
        """
        shard = self.shard
        room = -(-shard.full // shard.parts)
        if shard.size < room:
            padded = logits.new_full((len(logits), room), float("-inf"))
            padded[:, : shard.size] = logits
            logits = padded
        return self.collectives.all_gather(logits, shard.axis, -1)[:, : shard.full]

    def exchange(self, keys: Tensor) -> Tensor:
        """Return the keys of all ranks, int64 [ranks, N].

        Collectives through peers' memory send float32, and change only the bits 0x80008000.

        Args:
            keys: this rank's, int64 [N]; neither half of a key has these bits.
        """
        import torch

        if not len(keys):
            return keys.new_empty(self.shard.parts, 0)
        sent = keys.view(torch.float32)[None]
        return self.collectives.all_gather(sent, self.shard.axis).view(torch.int64)

    def edit(self, logits: Tensor, change: Callable[[Tensor], None]) -> None:
        """Change the logits of this rank's slice in place.

        Args:
            logits: [N, size].
            change: function that changes logits [N, V] in place, each independently of the
                others; those of other ranks' slices hold anything.
        """
        first = self.shard.start
        whole = logits.new_empty(len(logits), self.shard.full)
        own = whole[:, first : first + self.shard.size]
        own.copy_(logits)
        change(whole)
        logits.copy_(own)


@runtime_checkable
class SlicedVocabulary(Protocol):
    """A model or head that can return the logits of this rank's slice of the vocabulary.

    Attributes:
        slices: the division of the vocabulary; None: every rank computes all logits.
    """

    @property
    def slices(self) -> VocabularySlices | None:
        """The division of the vocabulary; None: every rank computes all logits."""
        ...

    def sliced_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's slice, float32 [N, size], of hidden [N, hidden].

        ``VocabularySlices.gather`` makes those of ``logits`` of them.
        """
        ...


@runtime_checkable
class SampledLastLayer(Model, Protocol):
    """A model that can run its last layer for some of a step's tokens only.

    A family of such models sets ``ModelOffers.sampled_last_layer``.
    """

    def trunk(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run all layers before the last one.

        Args:
            input_ids: token ids, int64 [T].
            positions: position of each token in its sequence, int64 [T].
            batch: the step.

        Returns:
            The residual stream, to which the last layer adds, [T, hidden].
        """
        ...

    def tail(self, stream: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run the last layer and the final norm.

        ``AttentionBackend.plan_step`` has last been called with ``batch``, or with
        ``batch.ends.batch`` if the batch has ``ends``.

        Args:
            stream: the result of ``trunk``, [T, hidden].
            positions: position of each token in its sequence, int64 [T].
            batch: the step.

        Returns:
            Final hidden states after the last norm: [T, hidden], equal to ``forward``'s; or, if the
                batch has ``ends``, those of its N end tokens, [N, hidden]. In both cases the keys
                of every token of the step are cached.
        """
        ...


@runtime_checkable
class KeepsFeatures(Model, Protocol):
    """A model that can return the residual stream between its layers."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The numbers of layers after which the stream is returned."""
        ...

    def keep_features(self, layers: Sequence[int]) -> None:
        """Append the stream after these numbers of layers to what ``forward`` returns.

        ``forward`` then returns [T, (1 + len(layers)) * hidden], normed hidden states first.

        Args:
            layers: numbers of layers, from 0 to all.
        """
        ...


class ModelFamily(Protocol):
    """A builder of models of some checkpoint architectures."""

    def build(self, context: BuildContext) -> Model:
        """Return the model, with weights allocated and not yet loaded.

        No collective runs and no file is read.
        """
        ...

    def build_nextn(self, context: BuildContext, target: Model, number: int = 0) -> Model:
        """Return a next-token (NextN) layer as a model of its own, for ``ModelOffers.nextn``.

        The model shares with ``target`` the tensors that its checkpoint lacks (embedding, head).

        Args:
            context: the build context; ``first_layer`` is the KV-pool number of the first NextN
                layer.
            target: the model that ``build`` returned.
            number: number of the NextN layer, from 0.
        """
        ...

    def build_eagle(self, context: BuildContext, target: Model) -> Model:
        """Return an EAGLE head as a model of its own, for ``ModelOffers.eagle_architectures``.

        The model shares with ``target`` the tensors that its folder lacks (embedding, head).

        Args:
            context: the build context, with the facts of the head's folder; ``first_layer`` is the
                KV-pool number of the head's layer.
            target: the model that ``build`` returned.
        """
        ...
