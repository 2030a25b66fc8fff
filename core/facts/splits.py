"""A check that a mesh divides the dimensions of a model that ranks split. Plan zone: no torch.

Model families declare the dimensions (``ModelFacts.splits``).
"""

from __future__ import annotations

from collections.abc import Mapping

from glowplug.core.facts.layer_sizes import SplitDimension
from glowplug.core.facts.model_facts import ModelFacts


def uneven(model: ModelFacts, mesh: Mapping[str, int], block: int = 1) -> list[SplitDimension]:
    """Return the dimensions that the ranks of ``mesh`` cannot split evenly, each name once.

    Raises:
        ValueError: the axes of ``mesh`` do not divide its tp ranks.
    """
    found: dict[str, SplitDimension] = {}
    for split in model.splits:
        if not split.divides(split.parts(mesh), block):
            found.setdefault(split.dimension, split)
    return list(found.values())


def fitting_sizes(model: ModelFacts, mesh: Mapping[str, int], block: int = 1) -> list[int]:
    """Return the sizes of tp, from the mesh's downwards, with which all dimensions split evenly.

    The other axes of the mesh stay as they are.
    """
    sizes = range(mesh.get("tp", 1), 0, -1)
    return [size for size in sizes if _fits(model, {**mesh, "tp": size}, block)]


def _fits(model: ModelFacts, mesh: Mapping[str, int], block: int) -> bool:
    try:
        return not uneven(model, mesh, block)
    except ValueError:
        return False
