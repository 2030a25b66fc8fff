"""Routed experts in block FP8 by sgl_kernel's build of CUTLASS's grouped GEMM.

Rows are sorted by expert without padding. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.moe.fp8 import library_layouts
from glowplug.kernels.moe.fp8.library_layouts import PackedRows
from glowplug.kernels.moe.sort import sum_placed
from glowplug.plugins.quantization.shared.expert_bytes import (
    CUTLASS_LAYOUT_INTS,
    CUTLASS_WORKSPACE,
    GROUP,
)
from glowplug.plugins.quantization.shared.libraries import library

NAMES = ("fp8_blockwise_scaled_grouped_mm",)  #: the function in sgl_kernel


class CutlassExperts:
    """``GroupedExperts`` by CUTLASS, for steps of any size.

    The library uses tiles of 32 rows for up to 2,048 pairs of a token and an expert, and of 128
    rows for more.
    """

    def __init__(self) -> None:
        self._multiply = library("experts", "cutlass", "sgl_kernel", NAMES)

    def pays(self, tokens: int, per_token: int, experts: int) -> bool:
        return True

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

        Intermediate results have ``dtype`` if it has 16 bits, otherwise bfloat16.

        Args:
            x: E4M3 [T, H].
            x_scales: scales of ``x``.
            w13: E4M3 [E, 2I, H].
            scales13: scales of ``w13``.
            w2: E4M3 [E, H, I].
            scales2: scales of ``w2``.
            ids: experts of each token [T, K].
            weights: float32 [T, K].
            dtype: of the result.

        Returns:
            [T, H] in ``dtype``.
        """
        result_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
        pairs = ids.numel()
        inter = w2.shape[2]
        order = library_layouts.packed(ids, w13.shape[0], x.shape[1], inter)
        wide, both, narrow = order.strides
        inputs = _empty(pairs, x.shape[1], x.device)
        library_layouts.spread(x, x_scales, ids, order.place, inputs[0], inputs[1].unsqueeze(0))
        hidden = self._gemm(
            inputs, w13, scales13, order, order.sizes[0], (wide, both), result_dtype
        )
        del inputs
        inner = _empty(pairs, inter, x.device)
        library_layouts.activate(hidden, ids, order.place, inner[0], inner[1].unsqueeze(0))
        del hidden
        outer = self._gemm(inner, w2, scales2, order, order.sizes[1], (narrow, wide), result_dtype)
        del inner
        return sum_placed(outer, order.place, ids, weights).to(dtype)

    def _gemm(
        self,
        x: tuple[Tensor, Tensor],
        weight: Tensor,
        scales: Tensor,
        order: PackedRows,
        sizes: Tensor,
        strides: tuple[Tensor, Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """Multiply each expert's rows by the expert's weight.

        The library fills in the pointers and the layouts of the scales, and keeps descriptors in
        the workspace.

        Args:
            x: values [R, K] in expert order, and their scales.
            weight: [E, N, K].
            scales: scales of ``weight``.
            order: first row of each expert.
            sizes: int32 [E, 3], the GEMM sizes of each expert.
            strides: row strides of ``x`` and of the result, int64 [E] each.
            dtype: of the result.

        Returns:
            [R, N]; rows that belong to no expert are uninitialised.
        """
        experts, columns, _ = weight.shape
        out = torch.empty(x[0].shape[0], columns, dtype=dtype, device=weight.device)
        pointers = torch.empty(5, experts, dtype=torch.int64, device=weight.device)
        layouts = torch.empty(
            2, experts, CUTLASS_LAYOUT_INTS, dtype=torch.int32, device=weight.device
        )
        workspace = torch.empty(CUTLASS_WORKSPACE, dtype=torch.uint8, device=weight.device)
        self._multiply(
            out,
            *pointers,
            x[0],
            weight.transpose(1, 2),
            x[1],
            scales.transpose(1, 2),
            strides[0],
            strides[0],
            strides[1],
            *layouts,
            sizes,
            order.starts,
            workspace,
        )
        return out


def _empty(rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return uninitialised E4M3 values [R, N] and row-major scales float32 [R, N / 128]."""
    return (
        torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(rows, size // GROUP, device=device),
    )
