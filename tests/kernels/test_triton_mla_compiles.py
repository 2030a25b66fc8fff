"""Latent attention's kernels compile for Hopper on a machine without one, which the interpreter
does not test: the prologue's, those that leave KV splits to W_UV's GEMM, and moves of entries.
"""

from __future__ import annotations

import pytest

from tests.support import uninterpreted

pytest.importorskip("triton")

SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.paged import merge_states as merge
from glowplug.kernels.mla import absorbed_fp8 as fp8
from glowplug.kernels.mla import expand as mla_expand
from glowplug.kernels.mla import cache_entries, decode, head_gemms, prologue
from glowplug.kernels.paged import move_entries
from glowplug.kernels.mla import value_projection as mla_values

x = "*bf16"
for cache in (x, "*fp8e4nv"):
    for blocks, rows, stored in ((0, 16, False), (8, 16, False), (8, 64, False), (4, 64, True)):
        build(prologue._prologue, dict(query=x, compressed=x, weight=x, cos_sin="*fp32",
                                       cache=cache, kv_slots="*i64",
              absorbed=x, own=x, w_uk="*fp8e4nv" if stored else x, scales="*fp32" if stored else x,
              eps="fp32"),
              dict(NOPE=128, LORA=512, HALF=32, LORA_BLOCK=512, HALF_BLOCK=32, HEAD_BLOCK=16,
                   PARTS=2,
                   INTERLEAVED=rows == 16, FP8=cache != x, UK_BLOCKS=blocks,
                   UK_BLOCK=128 if stored else 64, ROWS=rows,
                   DEPTH=128, STORED=stored, DEPENDENT=True, LEADS=True, uk_column=1))
for rows in (16, 64):
    for size, columns in ((128, 512), (512, 128)):
        build(fp8._by_heads_fp8, dict(x=x, w="*fp8e4nv", scales="*fp32", out=x),
              dict(SIZE=size, COLUMNS=columns, ROWS=rows, WIDTH=64, DEPENDENT=True))
for rows, block in ((16, 32), (64, 64)):
    build(head_gemms._by_heads, dict(x=x, w=x, out=x),
          dict(SIZE=512, COLUMNS=128, ROWS=rows, BLOCK=block, DEPTH=512, DEPENDENT=True, w_depth=1))
for splits, warps in ((9, 4), (8, 4), (4, 8), (16, 4)):
    build(mla_values._joined, dict(partial=x, lse="*fp32", lens="*i32", w=x, out=x),
          dict(SPLITS=splits, CHUNK=min(splits, 9) if splits < 10 else 8,
               BLOCK_S=16 if splits > 8 else splits,
               SHARES=4, DEPTH=128, ROWS=8, BLOCK=32, TILE=64, DEPENDENT=True, w_depth=1),
               num_warps=warps,
          launch_pdl=True)
build(cache_entries._store, dict(latent=x, k_rope=x, cache="*fp8e4nv", kv_slots="*i64"),
      dict(LORA=512, ROPE=64, BLOCK=1024, FP8=True))
build(cache_entries._gather, dict(cache="*fp8e4nv", out=x, kv_slots="*i32"),
      dict(SIZE=576, BLOCK=1024, ROWS=8))
build(cache_entries._in_e4m3, dict(query=x, out="*fp8e4nv"), dict(LINE=64, LINES=32))
build(mla_expand._spread, dict(rotary=x, keys=x), dict(SIZE=64, BLOCK=64, ROWS=64, DEPENDENT=True))
build(merge._merge_into, dict(out="*fp32", lse="*fp32", part=x, part_lse="*fp32"),
      dict(SIZE=128, BLOCK=128, ROWS=8))
for cache in (x, "*fp8e4nv"):
    build(decode.mla_decode_kernel,
          dict(query=x, kv=cache, page_table="*i32", kv_lens="*i32", tree_mask="*i64", out=x,
               lse="*fp32", scale="fp32", kv_scale="fp32"),
          dict(kv_stride=576, C=512, R=64, BLOCK_C=128, BLOCK_R=64, LATENT_TILES=4, BLOCK_M=16,
               BLOCK_N=64, PAGE=64, SPLIT=True, STAGES=2, TREE=True, PRECISION="tf32",
               DEPENDENT=True), num_warps=4, num_stages=2)
for word in move_entries.WORDS.values():
    build(move_entries.move_entries_kernel, dict(sources="*i64", targets="*i64", table="*i64"),
          dict(WORD=word, BLOCK=256, MOVES=move_entries.MOVES_AT_ONCE))
"""


DECODE = """
import re
from tests.support.compiled import build, gl, tile
from glowplug.kernels.mla.decode_hopper import mla_decode_hopper_kernel

for cache, ring in ((gl.bfloat16, 2), (gl.float8e4nv, 3)):
    for flat, tree in ((False, False), (True, False), (False, True)):
        made = build(mla_decode_hopper_kernel,
                     dict(query="*bf16", page_table="*i32", kv_lens="*i32",
                     tree_mask="*i64" if tree else "*i32", out="*bf16", lse="*fp32",
                     merged="*bf16", tickets="*i32", scale="fp32",
                     kv_scale="fp32",
                     latent_at=tile(64, 512, cache), rope_at=tile(64, 64, cache)),
                     dict(C=512, R=64, BLOCK_M=16, STAGES=ring, PAGE=64, SPLIT=True, TREE=tree,
                          MERGED_SPLITS=0,
                          FLAT=flat, DEPENDENT=True), num_warps=4, launch_pdl=True)
        steps = re.findall(r"fence.proxy.async|bar.sync|wgmma.fence|st.shared.v4|stmatrix",
                           made.asm["ptx"])
        behind = [after for step, after in zip(steps, steps[1:]) if step == "fence.proxy.async"]
        # barriers of the ring, queries, a tile's copy, weights
        assert behind == ["bar.sync"] * 4, steps
        first = steps.index("wgmma.fence")
        written = max(at for at in range(first) if steps[at] == "st.shared.v4")
        assert "fence.proxy.async" in steps[:written]
        assert steps[first - 2 : first] == ["fence.proxy.async", "bar.sync"]
"""


@pytest.mark.slow
def test_decoding_for_hopper_compiles() -> None:
    """Splits are stored in rows and side by side, of chains and of trees, of a cache in 16 bits and
    in FP8, whose pipeline is longer. Stores of threads to shared memory are fenced, and waited for,
    before the tensor cores read them: the compiler adds neither.
    """
    assert uninterpreted.printed("-c", DECODE).split() == ["mla_decode_hopper_kernel"] * 6


@pytest.mark.slow
def test_they_compile_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == [
        *["_prologue"] * 8,
        *["_by_heads_fp8"] * 4,
        *["_by_heads"] * 2,
        *["_joined"] * 4,
        "_store",
        "_gather",
        "_in_e4m3",
        "_spread",
        "_merge_into",
        *["mla_decode_kernel"] * 2,
        *["move_entries_kernel"] * 4,
    ]
