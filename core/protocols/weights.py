"""Protocols of weight sources and of the targets that they fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from glowplug.core.facts.model_facts import ModelFacts, TensorFact

if TYPE_CHECKING:
    from torch import Tensor


class WeightTarget(Protocol):
    """The destination of one checkpoint tensor; every target is stored exactly once.

    Attributes:
        name: checkpoint tensor name.
        shape: shape that the tensor must have in the checkpoint.
        index: slices of the tensor that this rank needs.
        optional: True: the tensor may be absent; then ``store`` is not called.
        dtype: torch dtype name that the tensor must have in the checkpoint ("float8_e4m3fn"); None:
            any floating dtype of 16 bits or more.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    optional: bool
    dtype: str | None

    def store(self, value: Tensor) -> None:
        """Copy a tensor into its final place.

        Args:
            value: the tensor sliced by ``index``, in the checkpoint's dtype, on the CPU or on the
                target's device, ready for the current stream. It may be a view of a larger buffer,
                which stays allocated as long as the view: a target that keeps the value must keep a
                clone.
        """
        ...


class WeightSource(Protocol):
    """A reader of checkpoint tensors."""

    def open(self, facts: ModelFacts) -> None:
        """Open the checkpoint and check that every file is complete and every header consistent.

        Raises:
            WeightError: a file is incomplete or a header inconsistent; the message has file and
                tensor.
        """
        ...

    def entries(self) -> Mapping[str, TensorFact]:
        """Return every tensor of the source, by name.

        An empty mapping marks a synthetic source, which makes any tensor that is read.
        """
        ...

    def read(self, target: WeightTarget) -> Tensor:
        """Return the target's slice of its tensor, on the CPU, in the checkpoint's dtype."""
        ...

    def close(self) -> None:
        """Close all files. No tensor is read afterwards."""
        ...


@runtime_checkable
class StreamingSource(WeightSource, Protocol):
    """A source that reads many targets faster together than one by one."""

    def stream(self, targets: Sequence[WeightTarget]) -> Iterator[tuple[WeightTarget, Tensor]]:
        """Yield each target once, with its tensor, in the order that reads fastest.

        Tensors are those that ``read`` would return. If the source can copy them to the rank's
        device, they are on that device, ready for the current stream.
        """
        ...
