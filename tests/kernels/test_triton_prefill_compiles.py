"""Kernels of V3's long steps, and one of its shortest, compile for Hopper on a machine without
one.
"""

from __future__ import annotations

import pytest

from tests.support import uninterpreted

pytest.importorskip("triton")

SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.formats import fp8_triton as fp8_quant
from glowplug.kernels.moe.fp8 import gated_splits as moe_gated_parts
from glowplug.kernels.moe.fp8 import gemm as moe_gemm_fp8
from glowplug.kernels.moe import route_choice

x, fp8, fp32, ints = "*bf16", "*fp8e4nv", "*fp32", "*i32"
of_experts = dict(x=fp8, x_scales=fp32, weight=fp8, stored=fp8, w_scales=fp32, values=fp8,
                  scales=fp32, out=x,
                  routed=fp32, pairs=ints, experts=ints, filled=ints)
for order, rows in (("tiles", 16), ("columns", 16), ("columns", 32), ("filled", 16)):
    same = dict(BLOCK_M=rows, SWAP=True, TMA=False, EVEN=True, ALIGNED=True, ORDER=order,
                DEPENDENT=True,
                ROUND=2 if order == "filled" else 1)
    build(moe_gemm_fp8._gated, of_experts, dict(PER_TOKEN=9, **same))
    build(moe_gemm_fp8._product, of_experts, dict(PER_TOKEN=1, WEIGHTED=True, BLOCK_N=128, FETCH=4,
                                                  **same))
for groups in (1, 16):
    build(fp8_quant._silu_and_mul_pairs, dict(x=x, pairs=ints, filled=ints, values=fp8,
                                              scales=fp32),
          dict(ROWS=2, GROUPS=groups, DEPENDENT=True))
build(moe_gated_parts._gated_parts, dict(x=fp8, x_scales=fp32, weight=fp8, stored=fp8,
                                         w_scales=fp32, values=fp8,
                                         scales=fp32, ids=ints, partial=fp32, tickets=ints),
      dict(PER_TOKEN=9, SPLITS=7, TOKENS=16, TMA=False, EVEN=True, DEPENDENT=True), launch_pdl=True)
build(route_choice._choose_each, dict(logits=fp32, bias=fp32, weights=fp32, ids=ints, scale="fp32"),
      dict(SPLITS=1, GROUPS=8, TOPK_GROUPS=4, G2=8, PER2=32, TOPK=8, FUSED_SHARED=1, OUT2=16,
           SIGMOID=True,
           RENORMALIZE=True, DEPENDENT=False), num_warps=1)
"""


@pytest.mark.slow
def test_they_compile_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == [
        *["_gated", "_product"] * 4,
        *["_silu_and_mul_pairs"] * 2,
        "_gated_parts",
        "_choose_each",
    ]
