"""Models and the weights that they are loaded with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.step.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.protocols.build_context import BuildContext


class WeightTarget(Protocol):
    """One checkpoint tensor that must be loaded: where it goes. Every target is stored exactly
    once.

    Attributes:
        name: checkpoint tensor name.
        shape: shape it must have in the checkpoint.
        index: slices of it that this rank needs.
        optional: may be absent (then ``store`` is not called).
        dtype: torch dtype name it must have in the checkpoint ("float8_e4m3fn"); None: any floating
            dtype of 16 bits or more.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    optional: bool
    dtype: str | None

    def store(self, value: Tensor) -> None:
        """Receive the sliced tensor, in the checkpoint's dtype, on the CPU or on the target's
        device (ready for the current stream). Copies it into its final place; who keeps it keeps
        more memory than its own, so keep a clone.
        """
        ...


class WeightSource(Protocol):
    def open(self, facts: ModelFacts) -> None:
        """Preflight: every file complete, every header consistent. WeightError naming file and
        tensor.
        """
        ...

    def entries(self) -> Mapping[str, TensorFact]:
        """Every tensor it holds. Empty for a synthetic source, which makes whatever is asked."""
        ...

    def read(self, target: WeightTarget) -> Tensor:
        """The target's slice of its tensor, on the CPU, in the checkpoint's dtype."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class StreamingSource(WeightSource, Protocol):
    """A source that reads many targets faster than one by one."""

    def stream(self, targets: Seq[WeightTarget]) -> Iterator[tuple[WeightTarget, Tensor]]:
        """Each target once, in the order that reads fastest, with what ``read`` would return; on
        the rank's own device where the source can bring it there, ready for the current stream."""
        ...


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
