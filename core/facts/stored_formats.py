"""Formats in which checkpoints store quantised weights, as schemes declare them. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from glowplug.core.facts.model_facts import ModelFacts, TensorFact

#: function from (facts, rows, columns) to the tensors that a checkpoint stores for one quantised
#: weight [rows, columns]: the last part of each tensor's name -> dtype and shape
Stored = Callable[[ModelFacts, int, int], Mapping[str, TensorFact]]


@dataclass(frozen=True)
class OnlineWeight:
    """A weight of an unquantized checkpoint, which a scheme may quantise while loading.

    Attributes:
        module: path of its module; ``{layer}`` and ``{expert}`` may stand for numbers.
        rows: number of rows in the checkpoint.
        columns: number of columns in the checkpoint.
        element: bytes of an element in the compute dtype, for weights that are left alone.
        options: the scheme's own parsed options.
    """

    module: str
    rows: int
    columns: int
    element: int
    options: Any


@dataclass(frozen=True)
class StoredLeaf:
    """Tensors of a quantised checkpoint with the same name ending, and their form after loading.

    Attributes:
        leaf: last part of the tensors' names, for example "weight_scale".
        kept: bytes of an element after loading, if weights stay quantised.
        dtype: stored dtype to which the entry applies; "" for any.
        scale: the tensors hold scales or zero points, which are dropped when weights are
            dequantised.
        packed: elements in one stored number.
    """

    leaf: str
    kept: float
    dtype: str = ""
    scale: bool = False
    packed: int = 1


class Counted(NamedTuple):
    """The contribution of one tensor to a ``Tally``.

    The fields are ``WeightKind.kept``, ``WeightKind.scale`` and the number of elements.
    """

    kept: float
    scale: bool
    elements: int


class StoredFormat:
    """The format of one checkpoint's quantised weights.

    Args:
        leaves: the tensors by name ending. Of entries with the same ending and dtype, the first
            counts.
        stored: function that returns the tensors of one weight; None if weights are stored as one
            tensor in the model's dtype.
    """

    def __init__(self, leaves: tuple[StoredLeaf, ...] = (), stored: Stored | None = None) -> None:
        self._leaves = {(leaf.leaf, leaf.dtype): leaf for leaf in reversed(leaves)}
        self._stored = stored

    def count(self, leaf: str, tensor: TensorFact) -> Counted:
        """Return the contribution of one stored tensor to the tally of elements.

        Args:
            leaf: last part of the tensor's name.
            tensor: the tensor's dtype and shape.
        """
        numbers = math.prod(tensor.shape)
        found = self._leaves.get((leaf, tensor.dtype)) or self._leaves.get((leaf, ""))
        if found is None:
            return Counted(0, False, numbers)
        return Counted(found.kept, found.scale, numbers * found.packed)

    def count_matrix(self, model: ModelFacts, rows: int, columns: int) -> list[Counted]:
        """Return the contributions of a quantised weight [rows, columns] to the tally of elements.

        The list has one item for each tensor that a checkpoint stores for the weight.
        """
        if self._stored is None:
            return [Counted(0, False, rows * columns)]
        stored = self._stored(model, rows, columns)
        return [self.count(leaf, tensor) for leaf, tensor in stored.items()]


def quantization_config(model: ModelFacts) -> Mapping[str, Any]:
    """Return ``quantization_config`` of config.json; empty if it has none."""
    stated = model.config.get("quantization_config")
    return stated if isinstance(stated, dict) else {}
