"""Loading of checkpoint matrices into E4M3 weights and block scales on a device.

A checkpoint that is not FP8 is quantised on the device as it arrives, in the blocks of the whole
checkpoint matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from glowplug.core.layers.module import Target
from glowplug.core.protocols import WeightTarget
from glowplug.kernels.formats import fp8
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.plugins.quantization.block_fp8.blocks import STORED, blocks_of, elements_of


def whole_blocks(size: int) -> int:
    """Return ``size`` rounded up to a multiple of the block size."""
    return -(-size // FP8_BLOCK) * FP8_BLOCK


def blocks(size: int) -> int:
    """Return the number of blocks in ``size`` elements, including a partial one."""
    return -(-size // FP8_BLOCK)


@dataclass(eq=False)
class StoredMatrix:
    """A slice of one checkpoint matrix, loaded into E4M3 values and block scales.

    Attributes:
        name: module name in the checkpoint.
        full: shape of the checkpoint matrix.
        index: the slice of the checkpoint matrix.
        values: E4M3 [rows, columns], the slice's destination.
        scales: float32 [ceil(rows / 128), ceil(columns / 128)], or with ``by_row`` [rows,
            ceil(columns / 128)] for a slice that does not begin at a block boundary.
        native: True if the checkpoint is FP8.
        by_row: True if each row has its own scales.
    """

    name: str
    full: tuple[int, int]
    index: tuple[slice, slice]
    values: Tensor
    scales: Tensor
    native: bool
    by_row: bool = False

    def targets(self) -> Iterator[WeightTarget]:
        touched = tuple(blocks_of(cut, size) for cut, size in zip(self.index, self.full))
        if not self.native:
            whole = tuple(elements_of(cut, size) for cut, size in zip(touched, self.full))
            yield Target(f"{self.name}.weight", self.full, index=whole, put=self._quantize)
            return
        grid = tuple(blocks(size) for size in self.full)
        yield Target(f"{self.name}.weight", self.full, self.values, self.index, dtype=STORED)
        yield Target(f"{self.name}.weight_scale_inv", grid, index=touched, put=self._put_scales)

    def _quantize(self, value: Tensor) -> None:
        stored, scales = fp8.quantize_weight(value.to(self.values.device))
        first = self._first_row()
        self.values.copy_(stored[first : first + self.values.shape[0]])
        self._put_scales(scales)

    def _put_scales(self, value: Tensor) -> None:
        if self.by_row:
            row = torch.arange(self.values.shape[0], device=value.device) + self._first_row()
            value = value.index_select(0, row // FP8_BLOCK)
        self.scales.copy_(value)

    def _first_row(self) -> int:
        """Return the row within a block at which the slice begins."""
        return (self.index[0].start or 0) % FP8_BLOCK


@dataclass(eq=False)
class SlicedMatrix:
    """A part of a checkpoint matrix cut into equal slices, one for each of several experts.

    Slices that do not begin at a block boundary are requantised in blocks of their own.

    Attributes:
        name: module name in the checkpoint.
        full: shape of the checkpoint matrix.
        index: slices that select the part.
        dim: dimension along which the part is cut.
        values: E4M3 [S, ...], the slices.
        scales: float32 [S, ...], the scales of the slices.
        native: True if the checkpoint is FP8.
    """

    name: str
    full: tuple[int, int]
    index: tuple[slice, slice]
    dim: int
    values: Tensor
    scales: Tensor
    native: bool

    def __post_init__(self) -> None:
        self._stored: Tensor | None = None
        self._grid: Tensor | None = None

    def targets(self) -> Iterator[WeightTarget]:
        if not self.native:
            yield Target(f"{self.name}.weight", self.full, index=self.index, put=self._quantize)
            return
        yield Target(
            f"{self.name}.weight",
            self.full,
            index=self.index,
            dtype=STORED,
            put=self._take_stored,
        )
        yield Target(
            f"{self.name}.weight_scale_inv",
            tuple(blocks(size) for size in self.full),
            index=tuple(blocks_of(cut, size) for cut, size in zip(self.index, self.full)),
            put=self._take_grid,
        )

    def _take_stored(self, value: Tensor) -> None:
        self._stored = value.to(self.values.device)
        self._finish()

    def _take_grid(self, value: Tensor) -> None:
        self._grid = value.to(self.values.device)
        self._finish()

    def _finish(self) -> None:
        stored = self._stored
        grid = self._grid
        if stored is None or grid is None:
            return
        self._stored = self._grid = None
        count = self.values.shape[0]
        if self.values.shape[self.dim + 1] % FP8_BLOCK:
            self._quantize(fp8.dequantize_weight(stored, grid, torch.float32))
            return
        self.values.copy_(torch.stack(stored.chunk(count, self.dim)))
        self.scales.copy_(torch.stack(grid.chunk(count, self.dim)))

    def _quantize(self, value: Tensor) -> None:
        parts = value.to(self.values.device).chunk(self.values.shape[0], self.dim)
        for expert, part in enumerate(parts):
            stored, scales = fp8.quantize_weight(part)
            self.values[expert].copy_(stored)
            self.scales[expert].copy_(scales)
