"""Routed experts in block FP8 by a grouped product over rows sorted by expert, for loads at which tensor cores are what
takes time."""
from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glowplug.kernels.triton import fp8_quant
from glowplug.kernels.triton.moe_align import Alignment, align
from glowplug.kernels.triton.moe_sort import gather_rows, sum_placed

TILE = 128  #: rows that one expert's are filled up to
LEAST_LOAD = 32  #: rows an expert gets on average from which sorting them pays


@cache
def deep_gemm() -> Any:
    """DeepGEMM's grouped product, or None where the library is missing."""
    try:
        return importlib.import_module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous
    except Exception:  # NOTE: on a machine without its card a library raises anything, not ImportError.
        return None


def pays(tokens: int, per_token: int, experts: int) -> bool:
    return tokens * per_token >= LEAST_LOAD * experts and deep_gemm() is not None


def _product(x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, layout: Tensor) -> Tensor:
    """x [R, K] and weight [E, N, K] -> bfloat16 [R, N]; layout int32 [R]: each row's expert, -1 for none."""
    out = torch.empty(x[0].shape[0], weight.shape[1], dtype=torch.bfloat16, device=weight.device)
    deep_gemm()(x, (weight, scales), out, layout)
    return out


def _layout(order: Alignment) -> Tensor:
    return order.expert_of_block.unsqueeze(1).expand(-1, TILE).reshape(-1)


def experts(x: Tensor, x_scales: Tensor, w13: Tensor, scales13: Tensor, w2: Tensor, scales2: Tensor, ids: Tensor,
            weights: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, H] quantised, ids and weights float32 [T, K] -> [T, H]."""
    order = align(ids, w13.shape[0], TILE)
    layout = _layout(order)
    values, scales, place = gather_rows(x, x_scales, order, ids.numel(), ids.shape[1])
    inner = fp8_quant.silu_and_mul(_product((values, scales), w13, scales13, layout))
    del values, scales
    return sum_placed(_product(inner, w2, scales2, layout), place, ids, weights).to(dtype)
