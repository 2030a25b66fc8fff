"""Formats in which checkpoints store quantised weights, as schemes declare them. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.facts.weight_classes import WHOLE


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight of a checkpoint.

    Attributes:
        model: facts of the model; ``model.config`` has the names of modules in another format.
        module: path of its module; ``{layer}`` and ``{expert}`` may stand for numbers if the plan
            has no tensor headers.
        rows: number of rows.
        columns: number of columns.
    """

    model: ModelFacts
    module: str
    rows: int
    columns: int


#: function from a ``StoredWeight`` to the tensors that a checkpoint stores for it: the last part of
#: each tensor's name -> dtype and shape
Stored = Callable[[StoredWeight], Mapping[str, TensorFact]]


@dataclass(frozen=True)
class OnlineWeight:
    """A weight of an unquantized checkpoint, which a scheme may quantise while loading.

    Attributes:
        module: path of its module; ``{layer}`` and ``{expert}`` may stand for numbers.
        rows: number of rows in the checkpoint.
        columns: number of columns in the checkpoint.
        element: bytes of an element in the compute dtype, for weights that are left alone.
        options: the scheme's own parsed options.
        role: role of the weight, one of ``weight_classes``: names differ between families.
    """

    module: str
    rows: int
    columns: int
    element: int
    options: Any
    role: str = WHOLE


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


#: entries of all tensors, or a function from facts and module path to the entries of its tensors
Leaves = tuple[StoredLeaf, ...] | Callable[[ModelFacts, str], tuple[StoredLeaf, ...]]


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

    def __init__(self, leaves: Leaves = (), stored: Stored | None = None) -> None:
        self._leaves = leaves
        self._by_name = _by_name(()) if callable(leaves) else _by_name(leaves)
        self._stored = stored

    def count(self, model: ModelFacts, name: str, tensor: TensorFact) -> Counted:
        """Return the contribution of one stored tensor to the tally of elements.

        Args:
            model: facts of the model.
            name: the tensor's name.
            tensor: the tensor's dtype and shape.
        """
        module, _, leaf = name.rpartition(".")
        known = self._by_name
        if callable(self._leaves):
            known = _by_name(self._leaves(model, module))
        numbers = math.prod(tensor.shape)
        found = known.get((leaf, tensor.dtype)) or known.get((leaf, ""))
        if found is None:
            return Counted(0, False, numbers)
        return Counted(found.kept, found.scale, numbers * found.packed)

    def count_matrix(self, weight: StoredWeight) -> list[Counted]:
        """Return the contributions of a quantised weight to the tally of elements.

        The list has one item for each tensor that a checkpoint stores for the weight.
        """
        if self._stored is None:
            return [Counted(0, False, weight.rows * weight.columns)]
        stored = self._stored(weight)
        return [
            self.count(weight.model, f"{weight.module}.{leaf}", tensor)
            for leaf, tensor in stored.items()
        ]


def _by_name(leaves: tuple[StoredLeaf, ...]) -> dict[tuple[str, str], StoredLeaf]:
    """Return entries by name ending and dtype."""
    return {(leaf.leaf, leaf.dtype): leaf for leaf in reversed(leaves)}


def quantization_config(model: ModelFacts) -> Mapping[str, Any]:
    """Return ``quantization_config`` of config.json; empty if it has none."""
    stated = model.config.get("quantization_config")
    return stated if isinstance(stated, dict) else {}
