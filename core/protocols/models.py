"""The contracts of models and model families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from glowplug.core.protocols.weights import WeightTarget
from glowplug.core.step.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.protocols.build_context import BuildContext


class Model(Protocol):
    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """int64 [T], int64 [T] -> final hidden states [T, hidden] (normed)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, V]."""
        ...

    def targets(self) -> Iterator[WeightTarget]: ...

    def finalize(self) -> None: ...

    def ignored(self, name: str) -> bool:
        """May this checkpoint tensor be left unread (a NextN layer that is not used, rotary
        tables)?
        """
        ...


@runtime_checkable
class SampledLastLayer(Model, Protocol):
    """A model whose last layer may run for some tokens of a step alone
    (``ModelOffers.sampled_last_layer``).
    """

    def trunk(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """int64 [T], int64 [T] -> what the last layer adds to, [T, hidden]."""
        ...

    def tail(self, stream: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """``trunk``'s result -> final hidden states (normed): [T, hidden], as ``forward`` gives;
        or, where the batch has ``ends``, [N, hidden] of these, with every token of the step cached.

        ``AttentionBackend.plan_step`` was last called for the batch, or for that of its ends.
        """
        ...


class ModelFamily(Protocol):
    def build(self, context: BuildContext) -> Model:
        """The model with empty weights. No collective, no file access."""
        ...

    def build_nextn(self, context: BuildContext, target: Model, number: int = 0) -> Model:
        """Next-token layer ``number`` as a model of its own (``ModelOffers.nextn``); ``target`` is
        what ``build`` made.

        It shares what its checkpoint lacks (embedding, head) with ``target``.
        ``context.first_layer`` is the KV-pool number of the first next-token layer.
        """
        ...
