"""Alternatives to a launch configuration of our own decode kernels, one constant at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from glowplug.kernels.launch.integers import cdiv
from glowplug.kernels.mha.decode import MhaTiling
from glowplug.kernels.mla.decode_tiling import MlaTiling

SPLITS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)  #: KV splits of a row
STAGES = (2, 3, 4, 5, 6, 7)
WARPS = (4, 8)
KEYS = (16, 32, 64, 128)  #: keys of a tile
PAIRS = (16, 32, 64)  #: (query token, head) pairs of a program
LATENT_TILES = (1, 2, 4)
WIDE_PAIRS = 64  #: pairs that two warp groups of the Hopper kernel share
PIPELINE_STAGES = (2, 3, 4)  #: the Hopper kernel keeps whole tiles in shared memory

Axis = Callable[[Any], Iterable[Any]]


def axes_of(start: MlaTiling | MhaTiling, context: int) -> Sequence[Axis]:
    """Return the axes of the search from ``start``, the most important one first.

    Args:
        start: the configuration of the rule; the kernel that it names stays.
        context: keys of a row.
    """
    splits = partial(_splits, context=context)
    if isinstance(start, MhaTiling):
        return (
            splits,
            partial(_values, name="block_n", values=KEYS),
            partial(_values, name="stages", values=STAGES),
            partial(_values, name="warps", values=WARPS),
        )
    if start.pipeline:
        return (
            splits,
            _hopper_pairs,
            partial(_values, name="stages", values=PIPELINE_STAGES),
            _merged,
            splits,
        )
    return (
        splits,
        partial(_values, name="block_n", values=KEYS),
        partial(_values, name="block_m", values=PAIRS),
        partial(_values, name="stages", values=STAGES),
        partial(_values, name="warps", values=WARPS),
        partial(_values, name="latent_tiles", values=LATENT_TILES),
    )


def _splits(tiling: MlaTiling | MhaTiling, context: int) -> Iterator[Any]:
    """Yield other numbers of KV splits, at most one for each tile of keys."""
    most = cdiv(context, tiling.block_n)
    for splits in SPLITS:
        if splits <= most and splits != tiling.splits:
            yield replace(tiling, splits=splits)


def _values(tiling: Any, name: str, values: Sequence[int]) -> Iterator[Any]:
    """Yield ``tiling`` with other values of the constant ``name``."""
    for value in values:
        if value != getattr(tiling, name):
            yield replace(tiling, **{name: value})


def _hopper_pairs(tiling: MlaTiling) -> Iterator[MlaTiling]:
    """Yield other numbers of pairs, with the warps that the Hopper kernel has for them."""
    for pairs in PAIRS:
        if pairs != tiling.block_m:
            is_wide = pairs == WIDE_PAIRS
            yield replace(
                tiling,
                block_m=pairs,
                warps=8 if is_wide else 4,
                merge_in_values=tiling.merge_in_values and not is_wide,
            )


def _merged(tiling: MlaTiling) -> Iterator[MlaTiling]:
    """Yield the same splits, merged by the other kernel, where W_UV's GEMM can merge them."""
    if tiling.splits > 1 and tiling.block_m < WIDE_PAIRS:
        yield replace(tiling, merge_in_values=not tiling.merge_in_values)
