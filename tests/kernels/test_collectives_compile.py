"""The kernels over peers' buffers compile for Hopper, on a machine without a GPU."""

from __future__ import annotations

import pytest

from tests.support import uninterpreted

pytest.importorskip("triton")

SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.collectives import (
    add_norm, all_reduce, expert_combine, expert_dispatch, expert_ids, gather
)

WHOLE = ("count", "capacity", "size", "columns", "row_stride", "rank_stride", "x_stride", "hidden")


def build_wide(*given, **options):
    # builds a kernel that polls for several 16-bit words at once
    made = build(*given, whole=WHOLE, **options)
    assert "ld.volatile.global.v" in made.asm["ptx"], given[0].__name__
    assert "ld.volatile.global.b16" not in made.asm["ptx"], given[0].__name__


BUFFERS = dict(peers="*i64", turns="*i32", fault="*i64", terms="*i64", sums="*i64")
for ranks in (8,):
    common = dict(RANK=1, RANKS=ranks, STAGES=7, LIMIT=300 * 10**9, DEPENDENT=True)
    for tile in (512, 2048):
        both = dict(x="*bf16", out="*bf16", **BUFFERS)
        options = dict(num_warps=all_reduce.warps_for(tile))
        for kernel in (all_reduce._one_shot, all_reduce._two_shot, gather._all_gather,
                       gather._reduce_scatter):
            build_wide(kernel, both, dict(TILE=tile, **common), **options)
    kinds = dict.fromkeys(("x", "residual", "weight", "total", "plain"), "*bf16")
    kinds |= dict(ids="*i32", values="*fp8e4nv", scales="*fp32", eps="fp32", **BUFFERS)
    norm = dict(GROUPS=64, SUMMED_ROWS=8, PLAIN=True, QUANTIZED=True, TILE=8192, **common)
    build_wide(add_norm._add_norm, kinds, norm, num_warps=add_norm.warps_for(8192))
    for kind, size, groups in (("*bf16", 7168, 0), ("*fp32", 7168, 0), ("*i16", 3584, 56)):
        kinds = dict(x=kind, out=kind, scales="*fp32", out_scales="*fp32", weights="*fp32",
                     ids="*i64", out_ids="*i32", out_weights="*fp32", **BUFFERS)
        constants = dict(TOPK=8, GROUPS=groups, HELD=32, WITHIN=1,
                         BLOCK=8192 if size > 4096 else 4096, BLOCK_K=8,
                         BLOCK_G=64 if groups else 1, PITCH=7424, BLOCK_PITCH=8192, **common)
        if not groups:
            constants |= dict(scales=None, out_scales=None)
        build_wide(expert_dispatch._dispatch, kinds, constants,
              num_warps=expert_dispatch.warps_for(size))
    for given, slots in (("*i32", dict(slots=None, WAYS=1)), ("*i64", dict(WAYS=64))):
        kinds = dict(ids=given, padding="*i1", counts="*i64", out="*i32", slots="*i64")
        build(expert_ids._rank_ids, kinds,
              dict(TOPK=8, BLOCK=128, BLOCK_K=8, DEPENDENT=True, **slots), num_warps=4)
    kinds = dict(y="*bf16", out="*bf16", beside="*bf16", local="*i32", ids="*i64", **BUFFERS)
    constants = dict(TOPK=8, HELD=32, WITHIN=1, BESIDE=True, BLOCK=8192, BLOCK_K=8, PITCH=7424,
                     BLOCK_PITCH=8192, **common)
    build_wide(expert_combine._combine, kinds, constants, num_warps=16)
"""


def test_they_compile_for_hopper() -> None:
    assert len(uninterpreted.printed("-c", SCRIPT).split()) == 2 * 4 + 1 + 3 + 2 + 1
