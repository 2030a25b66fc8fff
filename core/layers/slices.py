"""A rank's slices of the checkpoint matrices of linear layers and experts."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.layers.module import part_of
from glowplug.core.protocols import ExpertsShape, LinearShape


def linear_slices(
    shape: LinearShape,
) -> Iterator[tuple[str, tuple[int, int], tuple[slice, slice], slice]]:
    """Yield, for each checkpoint matrix of a linear layer, this rank's slice and its place.

    Yields:
        Module name, shape of the matrix, this rank's slice of it, and the slice's rows within the
        fused weight.
    """
    begin = 0
    for name, full, first, size in zip(
        shape.parts, shape.full, shape.row_starts, shape.outputs, strict=True
    ):
        index = part_of(first, size, full[0]), part_of(shape.col_start, shape.inputs, full[1])
        yield name, full, index, slice(begin, begin + size)
        begin += size


def expert_slices(
    shape: ExpertsShape,
) -> Iterator[tuple[str, tuple[int, int], tuple[slice, slice], int, slice | None]]:
    """Yield, for each checkpoint matrix of this rank's experts, the rank's slice and its place.

    Yields:
        Module name, shape of the matrix, this rank's slice of it, local number of the expert, and
        the matrix's columns within w13 (None: it is w2).
    """
    width = part_of(shape.inter_start, shape.inter, shape.inter_full)
    every = slice(None)
    for local, expert in enumerate(shape.numbers):
        prefix = f"{shape.prefix}.{expert}"
        for half, part in enumerate(shape.names[:2]):
            span = slice(half * shape.inter, (half + 1) * shape.inter)
            yield f"{prefix}.{part}", (shape.inter_full, shape.hidden), (width, every), local, span
        yield (
            f"{prefix}.{shape.names[2]}",
            (shape.hidden, shape.inter_full),
            (every, width),
            local,
            None,
        )
