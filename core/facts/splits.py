"""A check that ranks can split the dimensions of a model evenly. Plan zone: no torch.

Model families declare the dimensions (``ModelFacts.splits``).
"""

from __future__ import annotations

from collections.abc import Mapping

from glowplug.core.facts.layer_sizes import SplitDimension
from glowplug.core.facts.model_facts import ModelFacts


def uneven(model: ModelFacts, mesh: Mapping[str, int], block: int = 1) -> list[SplitDimension]:
    """Return the dimensions that the ranks of ``mesh`` cannot split evenly, one for each name.

    Raises:
        ValueError: the axes of ``mesh`` do not divide its tp ranks.
    """
    found: dict[str, SplitDimension] = {}
    for split in model.splits:
        if not split.divides(split.parts(mesh), block):
            found.setdefault(split.dimension, split)
    return list(found.values())


def fitting_sizes(model: ModelFacts, mesh: Mapping[str, int], block: int = 1) -> list[int]:
    """Return the sizes of the axis "tp" with which ranks can split all dimensions evenly.

    The sizes are in descending order and at most that of ``mesh``; other axes stay unchanged.
    """
    sizes = range(mesh.get("tp", 1), 0, -1)
    return [size for size in sizes if _fits(model, {**mesh, "tp": size}, block)]


def _fits(model: ModelFacts, mesh: Mapping[str, int], block: int) -> bool:
    try:
        return all(split.divides(split.parts(mesh), block) for split in model.splits)
    except ValueError:
        return False
