"""The multi-head kernels compile for Hopper on a machine without one, which the interpreter does
not test.
"""

from __future__ import annotations

import pytest

from tests.support import uninterpreted

pytest.importorskip("triton")

SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.mha import decode as mha_decode
from glowplug.kernels.mha import prefill as mha_prefill
from glowplug.kernels.mha import store as mha_store

whole = ("q_token", "q_head", "k_token", "v_token")
for x, cache, dim, rows, tree, page in (("*bf16", "*bf16", 128, 16, False, 64),
                                        ("*bf16", "*fp8e4nv", 96, 64, True, 16),
                                        ("*fp16", "*fp8e5", 64, 16, False, 64),
                                        ("*fp32", "*fp32", 80, 32, False, 1)):
    wide = x == "*fp32"
    most = {"*fp8e4nv": 448.0, "*fp8e5": 57344.0}.get(cache, 0.0)
    padded = 128 if dim > 64 else 64
    same = dict(D=dim, BLOCK_D=padded, GROUP=4, slot_stride=8 * dim, PAGE=page,
                PRECISION="tf32x3" if wide else "tf32",
                NARROW=cache.startswith("*fp8"))
    build(mha_store.mha_store_kernel, dict(k=x, v=x, k_cache=cache, v_cache=cache, kv_slots="*i64"),
          dict(SIZE=8 * dim, BLOCK=1024, MOST=most, DEPENDENT=True, LEADS=True), whole)
    build(mha_decode.mha_decode_kernel, dict(query=x, k_cache=cache, v_cache=cache,
                                             page_table="*i32", kv_lens="*i32",
          tree_mask="*i64", out=x, lse="*fp32", scale="fp32"),
          dict(same, BLOCK_M=rows, BLOCK_N=16 if wide else 64, SPLIT=tree, STAGES=3 if wide else 7,
               TREE=tree,
               DEPENDENT=True), whole, num_warps=4, num_stages=3 if wide else 7)
    for first_key in (0, 1):
        build(mha_prefill.mha_prefill_kernel, dict(q=x, k_cache=cache, v_cache=cache,
                                                   page_table="*i32",
              kv_lens="*i32", q_starts="*i32", out=x, scale="fp32"),
              dict(same, FIRST_KEY=first_key, BLOCK_Q=32 if wide else 64,
                   BLOCK_K=16 if wide else 64, BLOCK_R=128,
                   STAGES=2 if wide else 5), whole, num_warps=4, num_stages=2 if wide else 5)
"""


@pytest.mark.slow
def test_they_compile_for_hopper() -> None:
    assert (
        uninterpreted.printed("-c", SCRIPT).split()
        == ["mha_store_kernel", "mha_decode_kernel", *["mha_prefill_kernel"] * 2] * 4
    )
