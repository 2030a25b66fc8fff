"""What routed experts in block FP8 ask of a library's grouped product."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class GroupedExperts(Protocol):
    """Both products of experts and what lies between them."""

    def pays(self, tokens: int, per_token: int, experts: int) -> bool:
        """Is such a step multiplied here? Otherwise by our own kernels."""
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
        """x E4M3 [T, H] and its scales as ``fp8_quant`` lays them out, weights as of
        ``moe_gemm_fp8``, ids [T, K] (-1: not here) and weights float32 [T, K] -> [T, H] in
        ``dtype``."""
        ...
