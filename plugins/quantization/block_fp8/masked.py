"""Routed experts in block FP8 by DeepGEMM's masked GEMM.

Every expert has a buffer with the same number of rows, of which only those in use are multiplied.
Shapes depend only on the number of tokens, and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.moe.fp8 import library_layouts
from glowplug.kernels.moe.sort import sum_placed
from glowplug.plugins.quantization.block_fp8.grouped import Grouped
from glowplug.plugins.quantization.shared.expert_bytes import GROUP, MASKED_TOKENS, masked_rows
from glowplug.plugins.quantization.shared.libraries import library

#: the function's names in DeepGEMM's builds
NAMES = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")


class Masked:
    """``GroupedExperts`` by DeepGEMM's masked GEMM, for steps of up to ``MASKED_TOKENS`` tokens.

    Larger steps run as with ``quantization.experts = "auto"``.
    """

    def __init__(self) -> None:
        self._multiply = library("experts", "deep_gemm_masked", "deep_gemm", NAMES)
        self._larger_steps = Grouped("auto")

    def pays(self, tokens: int, per_token: int, experts: int) -> bool:
        return tokens <= MASKED_TOKENS or self._larger_steps.pays(tokens, per_token, experts)

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
        """Compute the routed experts; see ``GroupedExperts.experts``.

        Args:
            x: E4M3 [T, H].
            x_scales: scales of ``x``.
            w13: E4M3 [E, 2I, H].
            scales13: scales of ``w13``.
            w2: E4M3 [E, H, I].
            scales2: scales of ``w2``.
            ids: experts of each token [T, K]; a token's experts must all be different.
            weights: float32 [T, K].
            dtype: of the result.

        Returns:
            [T, H] in ``dtype``.
        """
        if x.shape[0] > MASKED_TOKENS:
            return self._larger_steps.experts(
                x, x_scales, w13, scales13, w2, scales2, ids, weights, dtype
            )
        count = w13.shape[0]
        rows = masked_rows(x.shape[0])
        place, counts = library_layouts.static(ids, count, rows)
        mean_rows = -(-ids.numel() // count)
        inputs = _empty(count, rows, x.shape[1], x.device)
        library_layouts.spread(x, x_scales, ids, place, inputs[0].flatten(0, 1), inputs[1])
        hidden = self._gemm(inputs, w13, scales13, counts, mean_rows)
        del inputs
        inner = _empty(count, rows, w2.shape[2], x.device)
        library_layouts.activate(hidden.flatten(0, 1), ids, place, inner[0].flatten(0, 1), inner[1])
        del hidden
        outer = self._gemm(inner, w2, scales2, counts, mean_rows)
        del inner
        return sum_placed(outer.flatten(0, 1), place, ids, weights).to(dtype)

    def _gemm(
        self,
        x: tuple[Tensor, Tensor],
        weight: Tensor,
        scales: Tensor,
        counts: Tensor,
        mean_rows: int,
    ) -> Tensor:
        """Multiply the rows in use of each expert by the expert's weight.

        NOTE: The kernel writes whole tiles of 64 or 128 rows, even where the next expert's rows
        begin; hence ``masked_rows``.

        Args:
            x: values [E, R, K] and their scales.
            weight: [E, N, K].
            scales: scales of ``weight``.
            counts: number of rows in use of each expert [E], the first ones of its buffer.
            mean_rows: expected number of rows per expert.

        Returns:
            bfloat16 [E, R, N].
        """
        out = torch.empty(
            *x[0].shape[:2], weight.shape[1], dtype=torch.bfloat16, device=weight.device
        )
        self._multiply(x, (weight, scales), out, counts, mean_rows)
        return out


def _empty(experts: int, rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return uninitialised E4M3 values [E, R, N] and float32 scales [E, R, N / 128].

    The scales are column-major for each expert (rows contiguous), as TMA loads them.
    """
    scales = torch.empty(experts, size // GROUP, rows, device=device)
    return torch.empty(
        experts, rows, size, dtype=torch.float8_e4m3fn, device=device
    ), scales.transpose(1, 2)
