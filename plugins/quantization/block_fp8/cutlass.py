"""Routed experts in block FP8 by CUTLASS's grouped product as sgl_kernel builds it, over rows of
experts one behind another. Nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.moe.fp8 import library_layouts as moe_places
from glowplug.kernels.moe.fp8.library_layouts import Packed
from glowplug.kernels.moe.sort import sum_placed
from glowplug.plugins.quantization.shared.expert_bytes import CUTLASS_WORKSPACE, GROUP, LAYOUT
from glowplug.plugins.quantization.shared.libraries import library

NAMES = ("fp8_blockwise_scaled_grouped_mm",)


class Cutlass:
    """Every step. It multiplies tiles of 32 rows for up to 2,048 pairs, and of 128 for more."""

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
        """x [T, H] quantised, ids and weights float32 [T, K] -> [T, H]. Rows are of ``dtype`` where
        that has 16 bits.
        """
        between = torch.float16 if dtype == torch.float16 else torch.bfloat16
        pairs = ids.numel()
        inter = w2.shape[2]
        order = moe_places.packed(ids, w13.shape[0], x.shape[1], inter)
        wide, both, narrow = order.strides
        given = _empty(pairs, x.shape[1], x.device)
        moe_places.spread(x, x_scales, ids, order.place, given[0], given[1].unsqueeze(0))
        hidden = self._product(given, w13, scales13, order, order.sizes[0], (wide, both), between)
        del given
        inner = _empty(pairs, inter, x.device)
        moe_places.activate(hidden, ids, order.place, inner[0], inner[1].unsqueeze(0))
        del hidden
        outer = self._product(inner, w2, scales2, order, order.sizes[1], (narrow, wide), between)
        del inner
        return sum_placed(outer, order.place, ids, weights).to(dtype)

    def _product(
        self,
        x: tuple[Tensor, Tensor],
        weight: Tensor,
        scales: Tensor,
        order: Packed,
        sizes: Tensor,
        strides: tuple[Tensor, Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """x [R, K] and weight [E, N, K] -> [R, N], rows of nobody left as they are. ``strides``: of
        x, and of results.

        The library fills the pointers and the layouts of scales in, and keeps descriptors in the
        workspace.
        """
        experts, columns, _ = weight.shape
        out = torch.empty(x[0].shape[0], columns, dtype=dtype, device=weight.device)
        pointers = torch.empty(5, experts, dtype=torch.int64, device=weight.device)
        layouts = torch.empty(2, experts, LAYOUT, dtype=torch.int32, device=weight.device)
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
    """Values E4M3 [R, N] and scales [R, N / 128], a row's side by side; neither filled."""
    return (
        torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(rows, size // GROUP, device=device),
    )
