"""Routed experts in block FP8 by DeepGEMM's grouped GEMM over rows sorted by expert.

It is faster than our own kernels at loads that are limited by the tensor cores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from glowplug.core.errors import GlowplugError
from glowplug.kernels.formats import fp8_triton
from glowplug.kernels.moe.align import Alignment, align
from glowplug.kernels.moe.sort import gather_rows, sum_placed
from glowplug.plugins.quantization.shared.expert_bytes import DEEP_GEMM_TILE, grouped_pays
from glowplug.plugins.quantization.shared.libraries import library

#: expected rows per expert passed to DeepGEMM, constant so that it compiles one kernel per GEMM
EXPECTED_ROWS = 256
LIBRARY = "deep_gemm"
NAMES = ("m_grouped_fp8_gemm_nt_contiguous",)
#: DeepGEMM's parameter for layouts that hold the end of each expert's rows
ENDS_PARAMETER = "use_psum_layout"
log = logging.getLogger("glowplug")


class Grouped:
    """``GroupedExperts`` by DeepGEMM's grouped GEMM.

    Args:
        wanted: the steps that DeepGEMM computes. "auto": those for which it pays; "deep_gemm":
            every step; "triton": none.

    Raises:
        GlowplugError: ``wanted`` is "deep_gemm" and DeepGEMM cannot be used.
    """

    def __init__(self, wanted: str = "auto") -> None:
        self._wanted = wanted
        self._multiply: Any = None
        self._by_ends = False
        if wanted == "triton":
            return
        try:
            self._multiply = library("experts", "deep_gemm", LIBRARY, NAMES)
            self._by_ends = _accepts_ends(self._multiply)
        except GlowplugError as error:
            if wanted == "deep_gemm":
                raise
            cause = error.__cause__  # the library's own exception; None on GPUs it does not support
            if cause and not (isinstance(cause, ModuleNotFoundError) and cause.name == LIBRARY):
                log.warning(
                    "quantization.experts: DeepGEMM is installed but cannot be used; our own "
                    "kernels run at every load: %s: %s",
                    type(cause).__name__,
                    cause,
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
        """Compute the routed experts; see ``GroupedExperts.experts``.

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
        order = align(ids, w13.shape[0], DEEP_GEMM_TILE)
        values, scales, place = gather_rows(x, x_scales, order, ids)
        hidden = self._gemm((values, scales), w13, scales13, order)
        del values, scales
        inner = fp8_triton.silu_and_mul_pairs(
            hidden, order.sorted_pairs, order.num_padded, ids.numel()
        )
        del hidden
        outer = self._gemm(inner, w2, scales2, order)
        del inner
        return sum_placed(outer, place, ids, weights).to(dtype)

    def _gemm(
        self, x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, order: Alignment
    ) -> Tensor:
        """Multiply each expert's rows of ``x`` by the expert's weight.

        NOTE: DeepGEMM takes either the expert of each row or the end of each expert's rows. With
        ends it stops after the last filled tile; otherwise it also fetches the tiles that stay
        empty, which takes as long as multiplying them. Some builds accept ends on Blackwell only.
        Only a call shows this: an assertion fails before anything is multiplied.

        Args:
            x: values [R, K] in expert order, and their scales.
            weight: [E, N, K].
            scales: scales of ``weight``.
            order: alignment of the rows.

        Returns:
            bfloat16 [R, N].
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
                    expected_m_for_psum_layout=EXPECTED_ROWS,
                )
                return out
            except RuntimeError as error:
                if ENDS_PARAMETER not in str(error):
                    raise
                self._by_ends = False
                log.warning(
                    "quantization.experts: this build of DeepGEMM does not accept the end of each "
                    "expert's rows; passing the expert of each row instead, which is slower: %s",
                    error,
                )
        layout = order.expert_of_block.unsqueeze(1).expand(-1, DEEP_GEMM_TILE).reshape(-1)
        self._multiply(x, (weight, scales), out, layout)
        return out


def _accepts_ends(multiply: Callable[..., Any]) -> bool:
    """Return True if DeepGEMM's function ``multiply`` can take the end of each expert's rows.

    Such a function has the parameter ``use_psum_layout``. The result is False if a compiled
    function has no signature; the expert of each row is then passed, which every build accepts.
    """
    try:
        return ENDS_PARAMETER in signature(multiply).parameters
    except ValueError:
        return False
