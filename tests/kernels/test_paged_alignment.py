"""Entries of a paged cache need not begin at multiples of 16 bytes: kernels fetch no more than
their alignment allows.

Triton derives the number of contiguous elements and the alignment of their addresses by itself. On
a GPU a wrong result is a misaligned address; compiled for one, it is read from the code.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.support import uninterpreted

pytest.importorskip("triton")
from tests.kernels.test_triton_mha import Case as MhaCase
from tests.kernels.test_triton_mla_decode import Case as MlaCase

SCRIPT = """
import json, re
from tests.support.compiled import build
from glowplug.kernels.mha import decode as mha_decode
from glowplug.kernels.mha import prefill as mha_prefill
from glowplug.kernels.mla import decode as mla_decode

def widest(kernel, pointers, constants, stages):
    made = build(kernel, pointers, constants, num_warps=4, num_stages=stages)
    code = made.asm["ptx"]
    copies = re.findall(r"cp\\.async\\.c[ag]\\.shared\\.global \\[.*?\\], \\[.*?\\], (0x\\w+)",
                        code)
    loads = re.findall(r"ld\\.global\\S*?(?:\\.v(\\d))?\\.b(\\d+)", code)
    return max([int(size, 16) for size in copies]
               + [int(count or 1) * int(bits) // 8 for count, bits in loads])

x, found = "*bf16", {}
for page in (1, 16, 64):
    for lora, rope in ((16, 4), (512, 64)):
        found[f"mla {lora + rope} {page}"] = widest(
            mla_decode.mla_decode_kernel, dict(query=x, kv=x, page_table="*i32", kv_lens="*i32",
                                               tree_mask="*i32",
            out=x, lse="*fp32", scale="fp32", kv_scale="fp32"),
            dict(kv_stride=lora + rope, C=lora, R=rope, BLOCK_C=max(16, lora // 4),
                 BLOCK_R=max(16, rope),
                 LATENT_TILES=4, BLOCK_M=16, BLOCK_N=64, PAGE=page, SPLIT=True, STAGES=3,
                 TREE=False, PRECISION="tf32",
                 DEPENDENT=True), 3)
    same = dict(D=12, BLOCK_D=16, GROUP=1, slot_stride=12, PAGE=page, PRECISION="tf32",
                NARROW=False, STAGES=3)
    found[f"decode 12 {page}"] = widest(
        mha_decode.mha_decode_kernel, dict(query=x, k_cache=x, v_cache=x, page_table="*i32",
                                           kv_lens="*i32",
        tree_mask="*i64", out=x, lse="*fp32", scale="fp32"),
        dict(same, BLOCK_M=16, BLOCK_N=64, SPLIT=True, TREE=False, DEPENDENT=True), 3)
    found[f"prefill 12 {page}"] = widest(
        mha_prefill.mha_prefill_kernel, dict(q=x, k_cache=x, v_cache=x, page_table="*i32",
                                             kv_lens="*i32",
        q_starts="*i32", out=x, scale="fp32"),
        dict(same, FIRST_KEY=0, BLOCK_Q=64, BLOCK_K=64, BLOCK_R=128), 3)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_nothing_wider_than_an_entry_allows_is_fetched() -> None:
    *_, found = uninterpreted.printed("-c", SCRIPT).splitlines()
    for name, width in json.loads(found).items():
        size = 2 * int(name.split()[1])  # bytes
        assert width == min(16, size & -size), (name, width)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16, 64])
def test_entries_of_40_bytes(page: int) -> None:
    case = MlaCase([15, 50, 64, 80], lora=16, rope=4, page=page, dtype=torch.bfloat16, seed=page)
    case.check(case.cut(), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16, 64])
def test_heads_of_24_bytes(page: int) -> None:
    case = MhaCase(
        [15, 50, 64, 80], heads=3, kv_heads=1, dim=12, page=page, dtype=torch.bfloat16, seed=page
    )
    case.check(case.cut(), 1e-2)
    case.check_prefill(tolerance=1e-2)
