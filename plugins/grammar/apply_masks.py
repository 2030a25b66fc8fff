"""Application of masks to logits, for every library of grammars."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Forbid = Callable[["Tensor", "Tensor", "Tensor"], None]


def forbid_on(device: str) -> Forbid:
    """Return the ``GrammarBackend.forbid`` of a device: Triton on CUDA if installed, else torch.

    ``device``: torch device string.
    """
    if device.startswith("cuda") and find_spec("triton") is not None:
        from glowplug.kernels.sampling import edits

        return edits.forbid
    from glowplug.kernels.sampling import reference

    return reference.forbid
