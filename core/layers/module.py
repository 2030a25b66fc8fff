"""The base of every layer: weight targets and finalisation, collected from children. Calls are
plain methods.

``torch.nn.Module`` is not used: its call and attribute machinery costs more than a small layer on a
CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from glowplug.core.protocols import WeightTarget


@dataclass(eq=False)
class Target:
    """A ``WeightTarget`` that copies into ``destination``, converting the dtype.

    ``index`` defaults to the whole tensor; ``put`` replaces the copy where the value needs more
    than that. ``dtype``: the checkpoint's, where the format fixes it.
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
        if self.put is not None:
            self.put(value)
        elif self.destination is not None:
            self.destination.copy_(value)


def part_of(start: int, size: int, full: int) -> slice:
    """Elements ``start`` to ``start + size`` of ``full``; ``slice(None)`` when that is all, as
    sources recognise.
    """
    return slice(None) if size == full else slice(start, start + size)


class Module:
    """A layer with children. Children are found among the attributes, lists included, in order of
    assignment.
    """

    def children(self) -> Iterator[Module]:
        for value in vars(self).values():
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, Module):
                    yield item

    def own_targets(self) -> Iterator[WeightTarget]:
        """Targets of this layer's own tensors."""
        return iter(())

    def targets(self) -> Iterator[WeightTarget]:
        yield from self.own_targets()
        for child in self.children():
            yield from child.targets()

    def elsewhere(self) -> Iterator[str]:
        """Module paths whose tensors other ranks hold."""
        for child in self.children():
            yield from child.elsewhere()

    def finalize(self) -> None:
        """After loading: children first."""
        for child in self.children():
            child.finalize()
