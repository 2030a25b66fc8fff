"""Routed experts in block FP8 by a grouped product over rows sorted by expert, for loads at which
tensor cores are what takes time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from glowplug.core.errors import GlowplugError
from glowplug.kernels.formats import fp8_triton as fp8_quant
from glowplug.kernels.moe.align import Alignment, align
from glowplug.kernels.moe.sort import gather_rows, sum_placed
from glowplug.plugins.quantization.shared.expert_bytes import TILE, grouped_pays
from glowplug.plugins.quantization.shared.libraries import library

#: what DeepGEMM is told to expect, the same at any load so that it compiles one kernel a product
USUAL_LOAD = 256
LIBRARY = "deep_gemm"
NAMES = ("m_grouped_fp8_gemm_nt_contiguous",)
ENDS = "use_psum_layout"  #: the library's word for layouts that say where each expert's rows end
log = logging.getLogger("glowplug")


class Grouped:
    """DeepGEMM's grouped product. ``wanted``: "auto" where it pays, "deep_gemm" always, "triton"
    never.
    """

    def __init__(self, wanted: str = "auto") -> None:
        self._wanted = wanted
        self._multiply: Any = None
        self._by_ends = False
        if wanted == "triton":
            return
        try:
            self._multiply = library("experts", "deep_gemm", LIBRARY, NAMES)
            self._by_ends = _takes_ends(self._multiply)
        except GlowplugError as error:
            if wanted == "deep_gemm":
                raise
            why = error.__cause__  #: of a library that was looked for
            if why and not (isinstance(why, ModuleNotFoundError) and why.name == LIBRARY):
                log.warning(
                    "quantization.experts: DeepGEMM is installed and cannot be used, so our own kernels "
                    "multiply every load: %s: %s",
                    type(why).__name__,
                    why,
                )

    def pays(self, tokens: int, per_token: int, experts: int) -> bool:
        return self._multiply is not None and grouped_pays(self._wanted, tokens, per_token, experts)

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
        """x [T, H] quantised, ids and weights float32 [T, K] -> [T, H]."""
        order = align(ids, w13.shape[0], TILE)
        values, scales, place = gather_rows(x, x_scales, order, ids)
        hidden = self._product((values, scales), w13, scales13, order)
        del values, scales
        inner = fp8_quant.silu_and_mul_pairs(
            hidden, order.sorted_pairs, order.num_padded, ids.numel()
        )
        del hidden
        outer = self._product(inner, w2, scales2, order)
        del inner
        return sum_placed(outer, place, ids, weights).to(dtype)

    def _product(
        self, x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, order: Alignment
    ) -> Tensor:
        """x [R, K] in order of experts and weight [E, N, K] -> bfloat16 [R, N].

        NOTE: told each row's expert, it fetches every tile that might be filled, and fetching takes
        as long as multiplying; told where each expert's rows end, it stops behind the last. Some
        builds take ends on Blackwell alone, and neither their signature nor a product of no rows
        says so: an assertion does, before it multiplies.
        """
        out = torch.empty(
            x[0].shape[0], weight.shape[1], dtype=torch.bfloat16, device=weight.device
        )
        if self._by_ends:
            try:
                self._multiply(
                    x,
                    (weight, scales),
                    out,
                    order.ends,
                    use_psum_layout=True,
                    expected_m_for_psum_layout=USUAL_LOAD,
                )
                return out
            except RuntimeError as error:
                if ENDS not in str(error):
                    raise
                self._by_ends = False
                log.warning(
                    "quantization.experts: this build of DeepGEMM cannot be told where experts' rows end and "
                    "is told each row's expert, which is slower: %s",
                    error,
                )
        layout = order.expert_of_block.unsqueeze(1).expand(-1, TILE).reshape(-1)
        self._multiply(x, (weight, scales), out, layout)
        return out


def _takes_ends(multiply: Callable[..., Any]) -> bool:
    """Compiled functions may not say what they take; those are told each row's expert, which every
    build can.
    """
    try:
        return ENDS in signature(multiply).parameters
    except ValueError:
        return False
