"""The contract of weight sources and of the targets that they fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from glowplug.core.facts.model_facts import ModelFacts, TensorFact

if TYPE_CHECKING:
    from torch import Tensor


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

    def stream(self, targets: Sequence[WeightTarget]) -> Iterator[tuple[WeightTarget, Tensor]]:
        """Each target once, in the order that reads fastest, with what ``read`` would return; on
        the rank's own device where the source can bring it there, ready for the current stream."""
        ...
