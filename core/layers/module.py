"""Base class of all layers: it collects weight targets and finalises the children.

Calls are plain methods. ``torch.nn.Module`` is not used: its call and attribute machinery costs
more than a small layer on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from glowplug.core.protocols import WeightTarget


@dataclass(eq=False)
class Target:
    """A ``WeightTarget`` that copies into ``destination`` and converts the dtype.

    Attributes:
        name: checkpoint tensor name.
        shape: shape of the tensor in the checkpoint.
        destination: tensor of the slice's shape; None: ``put`` stores the value.
        index: slices of the tensor that this rank needs; by default the whole tensor.
        optional: True: the tensor may be absent from the checkpoint.
        dtype: dtype in the checkpoint, if the format fixes it.
        put: function that is called with the value in place of the copy; None: the value is copied.
    """

    name: str
    shape: tuple[int, ...]
    destination: Tensor | None = None
    index: tuple[slice, ...] = ()
    optional: bool = False
    dtype: str | None = None
    put: Callable[[Tensor], None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.index:
            self.index = (slice(None),) * len(self.shape)

    def store(self, value: Tensor) -> None:
        """Copy ``value`` to the destination, or pass it to ``put``."""
        if self.put is not None:
            self.put(value)
        elif self.destination is not None:
            self.destination.copy_(value)


def part_of(start: int, size: int, full: int) -> slice:
    """Return the slice from ``start`` to ``start + size`` of a dimension of ``full`` elements.

    For the whole dimension it is ``slice(None)``, for which weight sources test.
    """
    return slice(None) if size == full else slice(start, start + size)


class Module:
    """A layer with children.

    Children are the layers among its attributes, including those in lists, in order of assignment.
    """

    def children(self) -> Iterator[Module]:
        """Yield the child layers."""
        for value in vars(self).values():
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, Module):
                    yield item

    def own_targets(self) -> Iterator[WeightTarget]:
        """Yield the targets of this layer's own tensors, without its children's."""
        return iter(())

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the targets of this layer and all its children."""
        yield from self.own_targets()
        for child in self.children():
            yield from child.targets()

    def elsewhere(self) -> Iterator[str]:
        """Yield the module paths whose tensors only other ranks hold."""
        for child in self.children():
            yield from child.elsewhere()

    def finalize(self) -> None:
        """Finish the layer after its weights are loaded, its children first."""
        for child in self.children():
            child.finalize()
