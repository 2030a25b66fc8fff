"""Routed experts in block FP8 by DeepGEMM's masked layout: so many rows for every expert, of which
those in use are multiplied. Shapes depend on the number of tokens alone, and nothing waits for the
device."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.moe.fp8 import library_layouts as moe_places
from glowplug.kernels.moe.sort import sum_placed
from glowplug.plugins.quantization.block_fp8.grouped import Grouped
from glowplug.plugins.quantization.shared.expert_bytes import GROUP, MASKED_TOKENS, masked_rows
from glowplug.plugins.quantization.shared.libraries import library

NAMES = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")  #: in DeepGEMM's builds


class Masked:
    """Steps of up to ``MASKED_TOKENS`` tokens; larger ones are multiplied as "auto" has them."""

    def __init__(self) -> None:
        self._multiply = library("experts", "deep_gemm_masked", "deep_gemm", NAMES)
        self._beyond = Grouped("auto")

    def pays(self, tokens: int, per_token: int, experts: int) -> bool:
        return tokens <= MASKED_TOKENS or self._beyond.pays(tokens, per_token, experts)

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
        """x [T, H] quantised, ids (of a token all different) and weights float32 [T, K] -> [T, H]."""
        if x.shape[0] > MASKED_TOKENS:
            return self._beyond.experts(
                x, x_scales, w13, scales13, w2, scales2, ids, weights, dtype
            )
        count = w13.shape[0]
        rows = masked_rows(x.shape[0])
        place, counts = moe_places.static(ids, count, rows)
        usual = -(-ids.numel() // count)
        given = _empty(count, rows, x.shape[1], x.device)
        moe_places.spread(x, x_scales, ids, place, given[0].flatten(0, 1), given[1])
        hidden = self._product(given, w13, scales13, counts, usual)
        del given
        inner = _empty(count, rows, w2.shape[2], x.device)
        moe_places.activate(hidden.flatten(0, 1), ids, place, inner[0].flatten(0, 1), inner[1])
        del hidden
        outer = self._product(inner, w2, scales2, counts, usual)
        del inner
        return sum_placed(outer.flatten(0, 1), place, ids, weights).to(dtype)

    def _product(
        self, x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, counts: Tensor, usual: int
    ) -> Tensor:
        """x [E, R, K] and weight [E, N, K] -> bfloat16 [E, R, N], of each expert the first
        ``counts`` rows.

        NOTE: it writes whole tiles of 64 or 128 rows, wherever the next expert's begin; hence
        ``masked_rows``.
        """
        out = torch.empty(
            *x[0].shape[:2], weight.shape[1], dtype=torch.bfloat16, device=weight.device
        )
        self._multiply(x, (weight, scales), out, counts, usual)
        return out


def _empty(experts: int, rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values E4M3 [E, R, N] and scales [E, R, N / 128] with rows side by side, as TMA loads them;
    neither filled.
    """
    scales = torch.empty(experts, size // GROUP, rows, device=device)
    return torch.empty(
        experts, rows, size, dtype=torch.float8_e4m3fn, device=device
    ), scales.transpose(1, 2)
