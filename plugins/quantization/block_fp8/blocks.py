"""Weight targets that dequantise block FP8 matrices, and conversion of slices to blocks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from glowplug.core.layers.module import Target, part_of
from glowplug.core.protocols import WeightTarget
from glowplug.kernels.formats import fp8
from glowplug.kernels.formats.fp8_block import FP8_BLOCK

STORED = "float8_e4m3fn"  #: dtype of quantised weights in the checkpoint


class BlockWeight:
    """One checkpoint matrix, dequantised into ``destination`` while it loads.

    Weight and scales may arrive in either order. The slice may begin anywhere within a block;
    blocks are always those of the whole checkpoint matrix.

    Attributes:
        name: module name in the checkpoint.
        full: shape of the checkpoint matrix.
        index: this rank's slice of the checkpoint matrix.
        destination: [rows, columns] of the slice, in the compute dtype.
        native: True if the checkpoint is FP8.
    """

    def __init__(
        self,
        name: str,
        full: tuple[int, int],
        index: tuple[slice, slice],
        destination: Tensor,
        native: bool,
    ) -> None:
        self.name = name
        self.full = full
        self.index = index
        self.destination = destination
        self.native = native
        self._stored: Tensor | None = None
        self._scales: Tensor | None = None

    def targets(self) -> Iterator[WeightTarget]:
        grid = tuple(-(-size // FP8_BLOCK) for size in self.full)
        blocks = tuple(blocks_of(cut, size) for cut, size in zip(self.index, self.full))
        if not self.native:
            whole = tuple(elements_of(cut, size) for cut, size in zip(blocks, self.full))
            yield Target(f"{self.name}.weight", self.full, index=whole, put=self._quantize)
            return
        yield Target(
            f"{self.name}.weight", self.full, index=self.index, dtype=STORED, put=self._take_stored
        )
        yield Target(f"{self.name}.weight_scale_inv", grid, index=blocks, put=self._take_scales)

    def _take_stored(self, value: Tensor) -> None:
        self._stored = _kept(value)
        self._finish()

    def _take_scales(self, value: Tensor) -> None:
        self._scales = _kept(value)
        self._finish()

    def _finish(self) -> None:
        if self._stored is None or self._scales is None:
            return
        rows, columns = self._offsets()
        self.destination.copy_(
            fp8.dequantize_weight(self._stored, self._scales, self.destination.dtype, rows, columns)
        )
        self._stored = self._scales = None

    def _quantize(self, value: Tensor) -> None:
        """Round unquantised weights to block FP8 and store this rank's slice, dequantised.

        ``value``: weights of all blocks that the slice touches.
        """
        stored, scales = fp8.quantize_weight(value)
        (first, rows), (left, columns) = zip(self._offsets(), self.destination.shape, strict=True)
        whole = fp8.dequantize_weight(stored, scales, self.destination.dtype)
        self.destination.copy_(whole[first : first + rows, left : left + columns])

    def _offsets(self) -> tuple[int, int]:
        """Return the row and column within a block at which the slice begins."""
        rows, columns = self.index
        return (rows.start or 0) % FP8_BLOCK, (columns.start or 0) % FP8_BLOCK


def _kept(value: Tensor) -> Tensor:
    """Return ``value``, copied if on a device, to keep it until weight and scales have arrived.

    On a device ``value`` is a view, which would keep a larger block of memory alive.
    """
    return value if value.is_cpu else value.clone()


def blocks_of(cut: slice, full: int) -> slice:
    """Return the slice of blocks that ``cut``, a slice of elements, touches.

    ``full``: number of elements of the whole dimension.
    """
    if cut == slice(None):
        return cut
    return part_of(
        cut.start // FP8_BLOCK,
        -(-cut.stop // FP8_BLOCK) - cut.start // FP8_BLOCK,
        -(-full // FP8_BLOCK),
    )


def elements_of(blocks: slice, full: int) -> slice:
    """Return the slice of elements that ``blocks``, a slice of blocks, covers.

    ``full``: number of elements of the whole dimension.
    """
    if blocks == slice(None):
        return blocks
    start = blocks.start * FP8_BLOCK
    return part_of(start, min(blocks.stop * FP8_BLOCK, full) - start, full)
