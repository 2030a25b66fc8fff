"""A check of whether the installed sgl-kernel has FlashAttention-3 for heads of one kind.

A build may leave kernels out. The library notices this when it launches one, prints a line and ends
the process, so the check runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import torch

ASKED = """
import sys
import torch
from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

heads, kv_heads, dim, pages = (int(word) for word in sys.argv[1:5])
kind = dict(dtype=getattr(torch, sys.argv[5]), device=sys.argv[6])
whole = dict(dtype=torch.int32, device=sys.argv[6])
cache = torch.zeros(2 * pages, kv_heads, dim, **kind)
query, starts = torch.zeros(4, heads, dim, **kind), torch.tensor([0, 4], **whole)
lengths = torch.tensor([4], **whole)
print("asked", flush=True)
flash_attn_varlen_func(query, cache[:4], cache[:4], cu_seqlens_q=starts, cu_seqlens_k=starts,
                       max_seqlen_q=4,
                       max_seqlen_k=4, softmax_scale=1.0, causal=True)
for page in (1, pages):
    paged = cache.view(-1, page, kv_heads, dim)
    table = torch.arange(len(paged), **whole)[None]
    for width in (1, 3):
        flash_attn_with_kvcache(q=query[None, :width], k_cache=paged, v_cache=paged,
                                cache_seqlens=lengths,
                                page_table=table, softmax_scale=1.0, causal=width > 1)
if sys.argv[6] == "cuda":
    torch.cuda.synchronize()
print("answered", flush=True)
"""


@cache
def lacks(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str = "cuda"
) -> str | None:
    """Return the library's message where it lacks a kernel, and None where it has it. Errors before
    the launch are the caller's.

    Heads are small tensors of zeros, contiguous and aligned, so a failure does not come from the
    arguments.
    """
    words = [str(number) for number in (heads, kv_heads, dim, 64)] + [
        str(dtype).removeprefix("torch."),
        device,
    ]
    done = subprocess.run(
        [sys.executable, "-c", ASKED, *words], text=True, capture_output=True, check=False
    )
    said = done.stdout.split()
    assert "asked" in said, done.stderr[-2000:]
    if "answered" in said and done.returncode == 0:
        return None
    return f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
