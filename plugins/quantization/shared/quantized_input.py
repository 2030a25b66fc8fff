"""Activations for GEMMs of quantised weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from glowplug.core.protocols import Quantized


def quantized(
    x: Tensor | Quantized, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return values and scales of activations, quantising them if their producer has not.

    Args:
        x: activations [T, K], plain or already quantised with scales.
        quantize: function that returns the values and the scales of plain activations.
    """
    if not isinstance(x, Quantized):
        return quantize(x)
    assert x.scales is not None, "the layer's input format has scales"
    return x.values, x.scales
