"""Conformance suite of the ``weights`` slot, for sources that read files.

Subclass it and define ``open_source``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glowplug.core.errors import WeightError
from glowplug.core.protocols import WeightSource


@dataclass
class WantedTensor:
    """A weight target that is only read, never stored."""

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    optional: bool = False
    dtype: str | None = None

    def store(self, value: Tensor) -> None:
        raise AssertionError("a source reads; the loader stores")


def whole(value: Tensor) -> tuple[slice, ...]:
    """Return the slices, one per dimension, that select the whole tensor."""
    return (slice(None),) * value.dim()


def cuts(value: Tensor) -> list[tuple[slice, ...]]:
    """Return index tuples to read: the whole tensor, written in two ways, and parts of it.

    The parts are the middle of each dimension alone, and the middle of all dimensions.
    """
    full = tuple(slice(0, size) for size in value.shape)
    middles = [
        slice(size // 3, max(size // 3 + 1, size - size // 4)) if size else slice(0, 0)
        for size in value.shape
    ]
    return [
        whole(value),
        full,
        *((*full[:dim], middle, *full[dim + 1 :]) for dim, middle in enumerate(middles)),
        tuple(middles),
    ]


def same(got: Tensor, expected: Tensor) -> bool:
    """Return whether dtype, shape and every bit are equal (FP8 cannot be compared directly)."""
    return (
        got.dtype == expected.dtype
        and got.shape == expected.shape
        and torch.equal(
            got.contiguous().flatten().view(torch.uint8),
            expected.contiguous().flatten().view(torch.uint8),
        )
    )


class WeightSourceSuite:
    """Tests that every source of stored weights must pass."""

    def open_source(self, folder: Path) -> tuple[WeightSource, dict[str, Tensor]]:
        """Write a model into the empty ``folder`` and open a source on it.

        Returns:
            The source, and the model's tensors by published name.
        """
        raise NotImplementedError

    def test_entries_state_names_shapes_and_dtypes(self, tmp_path: Path) -> None:
        source, values = self.open_source(tmp_path)
        entries = source.entries()
        assert entries.keys() == values.keys()
        for name, value in values.items():
            assert (entries[name].shape, entries[name].dtype) == (
                tuple(value.shape),
                str(value.dtype).removeprefix("torch."),
            )
        source.close()

    def test_slices_are_those_of_the_tensor(self, tmp_path: Path) -> None:
        """Slices can be read in any order, and twice."""
        source, values = self.open_source(tmp_path)
        for name in [*reversed(values), *values]:
            for index in cuts(values[name]):
                got = source.read(WantedTensor(name, tuple(values[name].shape), index))
                assert got.device.type == "cpu" and same(got, values[name][index]), (name, index)
        source.close()

    def test_what_is_read_belongs_to_the_reader(self, tmp_path: Path) -> None:
        """A tensor does not change when the next one is read or the source is closed."""
        source, values = self.open_source(tmp_path)
        got = {
            name: source.read(WantedTensor(name, tuple(value.shape), whole(value)))
            for name, value in values.items()
        }
        source.close()
        assert all(same(got[name], value) for name, value in values.items())

    def test_another_name_or_shape_is_refused_by_name(self, tmp_path: Path) -> None:
        source, values = self.open_source(tmp_path)
        name, value = next(iter(values.items()))
        with pytest.raises(WeightError, match=r"no_such\.weight"):
            source.read(WantedTensor("no_such.weight", tuple(value.shape), whole(value)))
        with pytest.raises(WeightError, match=name.replace(".", r"\.")):
            source.read(WantedTensor(name, (*value.shape[:-1], value.shape[-1] + 1), whole(value)))
        source.close()
