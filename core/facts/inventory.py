"""The tensors of a model family, and element counts from them or from tensor headers. No torch.

A family declares its tensors once (``ModelOffers.inventory``). Parameter counts, the byte budget of
each rank and the dimensions that ranks split follow from that declaration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from glowplug.core.facts.layer_sizes import LayerSizes, SplitDimension
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.stored_formats import StoredFormat, StoredWeight
from glowplug.core.facts.weight_classes import (
    LAYER_PREFIX,
    TARGET,
    WHOLE,
    WeightKind,
    next_token_layer,
)

LAYER = "{layer}"  #: stands for the number of a layer in the name of a tensor
EXPERT = "{expert}"  #: stands for the number of an expert

#: format of weights that are stored as they are
UNQUANTIZED = StoredFormat()

_PLACES = re.compile(r"\{\w+\}")
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Split:
    """The dimension of a tensor that ranks split.

    Attributes:
        dimension: its name for messages, the key in config.json if it has one.
        size: its size in units.
        unit: elements per unit, which stay together.
        columns: ranks split the columns (inputs); then every rank has the whole bias.
        module: module path for messages; "" for the path of the tensor's own module. Several
            tensors may have the same one.
    """

    dimension: str
    size: int
    unit: int = 1
    columns: bool = False
    module: str = ""


@dataclass(frozen=True)
class TensorSpec:
    """Tensors of a model with one role and shape: matrices [rows, columns], or vectors [rows].

    Attributes:
        name: name in published checkpoints, with ``{layer}`` and ``{expert}`` for numbers, for
            example "model.layers.{layer}.self_attn.o_proj.weight".
        role: role in ``weight_classes``, which decides how ranks split the tensor.
        rows: number of rows.
        columns: number of columns; 0 for a vector.
        layers: numbers of the layers that have the tensor, those of next-token layers included.
        experts: number of these tensors in each layer, one per expert, if the name has
            ``{expert}``.
        quantized: quantised checkpoints store the tensor in their quantised format.
        split: the dimension that ranks split; None if every rank has the whole tensor.
        optional: only some checkpoints have the tensor; it is counted from tensor headers only.
    """

    name: str
    role: str
    rows: int
    columns: int = 0
    layers: Sequence[int] = ()
    experts: int = 1
    quantized: bool = False
    split: Split | None = None
    optional: bool = False

    @property
    def module(self) -> str:
        """Path of the module that has the tensor."""
        return self.name.rpartition(".")[0]

    def copies(self, draft: int, layers: int) -> int:
        """Return the number of these tensors in one next-token layer or in the target model.

        Args:
            draft: number of the next-token layer, or ``TARGET``.
            layers: number of layers of the model, which next-token layers follow.
        """
        if LAYER not in self.name:
            return self.experts if draft == TARGET else 0
        return self.experts * sum(max(TARGET, layer - layers) == draft for layer in self.layers)


@dataclass(frozen=True)
class Inventory:
    """The tensors and sizes of one model.

    Attributes:
        tensors: its tensors; those that are not listed count as whole on every rank.
        sizes: sizes of its layers.
        unloaded: name endings of the checkpoint tensors that are not loaded.
    """

    tensors: tuple[TensorSpec, ...] = ()
    sizes: LayerSizes = field(default_factory=LayerSizes)
    unloaded: tuple[str, ...] = ()

    def role_of(self, name: str) -> str:
        """Return the role of the checkpoint tensor ``name``, which decides how ranks split it.

        The roles are the constants of ``weight_classes``, such as "heads" or "experts". Scales and
        biases have the role of their module's weight, with one exception: if ranks split the
        columns of the weight, every rank holds the whole bias, and its role is "whole".
        """
        return self._role(_NUMBERS.sub("*", name))

    @cached_property
    def _role(self) -> Callable[[str], str]:
        """A cache of roles by name with "*" for numbers; experts share most names."""
        return cache(self._role_by_pattern)

    def _role_by_pattern(self, pattern: str) -> str:
        """Return the role of a tensor by its name with "*" for numbers."""
        spec = self._by_name.get(pattern)
        if spec is not None:
            return spec.role
        module, _, leaf = pattern.rpartition(".")
        spec = self._by_module.get(module)
        if spec is None or leaf == "bias" and spec.split is not None and spec.split.columns:
            return WHOLE
        return spec.role

    @cached_property
    def splits(self) -> tuple[SplitDimension, ...]:
        """The dimensions that ranks split, with one entry for all layers that are alike."""
        found: dict[tuple[str, str], SplitDimension] = {}
        for spec in self.tensors:
            split = spec.split
            if split is None or spec.optional or (LAYER in spec.name and not spec.layers):
                continue
            module = split.module or spec.module
            first = str(spec.layers[0]) if spec.layers else ""
            found.setdefault(
                (module, split.dimension),
                SplitDimension(
                    module.replace(LAYER, first),
                    split.dimension,
                    split.size,
                    spec.role,
                    split.unit,
                    spec.quantized,
                ),
            )
        return tuple(found.values())

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {_PLACES.sub("*", spec.name): spec for spec in self.tensors}

    @cached_property
    def _by_module(self) -> dict[str, TensorSpec]:
        return {_PLACES.sub("*", spec.module): spec for spec in self.tensors if spec.columns}


def count_declared(
    model: ModelFacts, inventory: Inventory, stored: StoredFormat
) -> dict[WeightKind, int]:
    """Return the number of elements of each kind in the tensors that a model family declares.

    Plans use these counts where the tensor headers of a checkpoint are not available.

    Args:
        model: facts of the model.
        inventory: the tensors of the model, as its family declares them.
        stored: format of its quantised weights.
    """
    found: dict[WeightKind, int] = {}
    for spec in inventory.tensors:
        if spec.optional:
            continue
        for draft in (TARGET, *range(model.nextn_layers)):
            copies = spec.copies(draft, model.num_layers)
            if not copies:
                continue
            form = stored if spec.quantized else UNQUANTIZED
            weight = StoredWeight(model, spec.module, spec.rows, spec.columns or 1)
            for kept, scale, elements in form.count_matrix(weight):
                kind = WeightKind(spec.role, kept, scale, draft)
                found[kind] = found.get(kind, 0) + elements * copies
    return found


def count_stored(
    model: ModelFacts, inventory: Inventory, stored: StoredFormat, prefix: str = LAYER_PREFIX
) -> dict[WeightKind, int]:
    """Return the number of elements of each kind, counted from a checkpoint's tensor headers.

    Args:
        model: facts of the model, with tensors.
        inventory: the tensors of its family, which give roles to names.
        stored: format of its quantised weights.
        prefix: beginning of the names of layers' tensors (``ModelOffers.layer_prefix``).
    """
    found: dict[WeightKind, int] = {}
    for name, tensor in model.tensors.items():
        if name.endswith(inventory.unloaded):
            continue
        kept, scale, elements = stored.count(model, name, tensor)
        draft = next_token_layer(name, model.num_layers, prefix)
        kind = WeightKind(inventory.role_of(name), kept, scale, draft)
        found[kind] = found.get(kind, 0) + elements
    return found


def count_online(
    model: ModelFacts,
    inventory: Inventory,
    kept: Callable[[str, str, int, int], float],
    roles: frozenset[str],
    prefix: str = LAYER_PREFIX,
) -> dict[WeightKind, int]:
    """Return the number of elements of each kind if a scheme quantises weights while loading.

    Args:
        model: facts of an unquantized model.
        inventory: the tensors of its family.
        kept: function from role, module path, rows and columns to the bytes of the loaded weight.
        roles: roles of the weights that are quantised.
        prefix: beginning of the names of layers' tensors (``ModelOffers.layer_prefix``).
    """
    found: dict[WeightKind, int] = {}
    for name, role, shape, draft, copies in _weights(model, inventory, prefix):
        count = math.prod(shape)
        matrix = role in roles and len(shape) == 2
        whole = kept(role, name.rpartition(".")[0], *shape) if matrix else 0.0
        kind = WeightKind(role, whole / count, False, draft)
        found[kind] = found.get(kind, 0) + count * copies
    return found


def _weights(
    model: ModelFacts, inventory: Inventory, prefix: str
) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """Yield the tensors of a model: from its headers, or as its family declares them.

    Yields:
        Name, role, shape, number of the next-token layer (or ``TARGET``), and number of copies.
    """
    for name, tensor in model.tensors.items():
        if not name.endswith(inventory.unloaded):
            draft = next_token_layer(name, model.num_layers, prefix)
            yield name, inventory.role_of(name), tensor.shape, draft, 1
    for spec in () if model.tensors else inventory.tensors:
        shape = (spec.rows, spec.columns) if spec.columns else (spec.rows,)
        for draft in () if spec.optional else (TARGET, *range(model.nextn_layers)):
            copies = spec.copies(draft, model.num_layers)
            if copies:
                yield spec.name, spec.role, shape, draft, copies
