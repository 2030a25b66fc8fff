"""Ops that return quantised activations, built from the kernels of one format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from glowplug.core.layers.linear import Both, both_formats
from glowplug.core.protocols import Parts, Quantized

Pair = tuple[Tensor, Tensor]  #: values and scales


class Norm(Protocol):
    """Function that returns the RMSNorm of x [T, N] in quantised form.

    The function also writes the result in the activation dtype to ``plain`` [T, N], unless
    ``plain`` is None.
    """

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, plain: Tensor | None = None
    ) -> Pair: ...


class AddNorm(Protocol):
    """Function like ``Norm`` for the sum of x and ``residual`` [T, N], which it returns too."""

    def __call__(
        self,
        x: Tensor | Parts,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        plain: Tensor | None = None,
    ) -> tuple[Pair, Tensor]: ...


def producers(
    input_format: str,
    *,
    quantize: Callable[[Tensor], Pair],
    silu_and_mul: Callable[[Tensor], Pair],
    rms_norm: Norm,
    add_rms_norm: AddNorm,
) -> Mapping[tuple[str, str], Callable[..., Any]]:
    """Return the entries of ``Ops.fused`` whose results are quantised to ``input_format``.

    Further entries are norms that store their result twice: quantised for one layer, and in the
    activation dtype for another.
    """

    def cast(x: Tensor) -> Quantized:
        return Quantized(*quantize(x))

    def activated(x: Tensor) -> Quantized:
        return Quantized(*silu_and_mul(x))

    def normed(x: Tensor, weight: Tensor, eps: float) -> Quantized:
        return Quantized(*rms_norm(x, weight, eps))

    def added(
        x: Tensor | Parts, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Quantized, Tensor]:
        pair, total = add_rms_norm(x, residual, weight, eps)
        return Quantized(*pair), total

    return {
        ("cast", input_format): cast,
        ("silu_and_mul", input_format): activated,
        ("rms_norm", input_format): normed,
        ("add_rms_norm", input_format): added,
        **_producers_of_both(both_formats(input_format), rms_norm, add_rms_norm),
    }


def _producers_of_both(
    both: str, rms_norm: Norm, add_rms_norm: AddNorm
) -> Mapping[tuple[str, str], Callable[..., Any]]:
    """Return the norms with plain and quantised results, by (op, ``both``) as in ``Ops.fused``."""

    def normed_both(x: Tensor, weight: Tensor, eps: float) -> Both:
        plain = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return Both(plain, Quantized(*rms_norm(x, weight, eps, plain)))

    def added_both(
        x: Tensor | Parts, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Both, Tensor]:
        plain = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        pair, total = add_rms_norm(x, residual, weight, eps, plain)
        return Both(plain, Quantized(*pair)), total

    return {("rms_norm", both): normed_both, ("add_rms_norm", both): added_both}
