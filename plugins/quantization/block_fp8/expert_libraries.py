"""Protocol of the libraries that compute routed experts in block FP8 by grouped GEMMs."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class GroupedExperts(Protocol):
    """A library that computes routed experts: both GEMMs and the activation between them."""

    def pays(self, tokens: int, per_token: int, experts: int) -> bool:
        """Return True if this library computes the experts of a step; else our own kernels do.

        Args:
            tokens: number of tokens of the step.
            per_token: number of experts of a token.
            experts: number of experts on this rank.
        """
        ...

    def experts(
        self,
        x: Tensor,
        x_scales: Tensor,
        w13: Tensor,
        scales13: Tensor,
        w2: Tensor,
        scales2: Tensor,
        ids: Tensor,
        weights: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Compute the routed experts.

        Args:
            x: E4M3 [T, H].
            x_scales: scales of ``x`` in the layout of ``kernels/formats/fp8_triton``.
            w13: gate and up weights, as in ``kernels/moe/fp8/gemm``.
            scales13: scales of ``w13``.
            w2: down weights, as in ``kernels/moe/fp8/gemm``.
            scales2: scales of ``w2``.
            ids: experts of each token [T, K]; -1: not on this rank.
            weights: float32 [T, K].
            dtype: of the result.

        Returns:
            [T, H] in ``dtype``.
        """
        ...
