"""The slice of a tensor as runs of consecutive elements of the whole, row-major tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """A slice as runs of ``width`` consecutive elements.

    Attributes:
        shape: shape of the slice.
        first: position of the first run's first element in the whole tensor.
        outer: of each dimension across runs, the number of runs and the elements between them,
            outermost first.
        width: number of elements in a run.
    """

    shape: tuple[int, ...]
    first: int
    outer: tuple[tuple[int, int], ...]
    width: int

    @classmethod
    def of(cls, shape: Sequence[int], index: Sequence[slice]) -> Cut:
        """Return the cut that ``index``, one slice for each dimension, makes of ``shape``."""
        ranges = [range(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
        first, stride, width = 0, 1, 1
        outer: list[tuple[int, int]] = []
        for kept, size in zip(reversed(ranges), reversed(shape), strict=True):
            first += kept.start * stride
            if not outer and width == stride and kept.step == 1:
                width *= len(kept)
            else:
                outer.insert(0, (len(kept), kept.step * stride))
            stride *= size
        return cls(tuple(map(len, ranges)), first, tuple(outer), width)

    def positions(self, most: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the elements' positions in the whole tensor, int64, in order and in pieces.

        Args:
            most: number of positions in a piece; a run longer than this is divided if it is the
                only one.
            device: device of the pieces.
        """
        if not self.outer:
            for at in range(0, max(self.width, 1), most):
                end = min(at + most, self.width)
                yield torch.arange(self.first + at, self.first + end, device=device)
            return
        starts = torch.tensor([self.first], device=device)
        for count, pitch in self.outer:
            starts = (starts[:, None] + torch.arange(count, device=device) * pitch).flatten()
        columns = torch.arange(self.width, device=device)
        for some in starts.split(max(1, most // max(1, self.width))):
            yield (some[:, None] + columns).flatten()
