"""In-place merge of attention results over disjoint sets of keys, in Triton.

The reference is in ``kernels.paged.merge_states_reference``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import cdiv, next_power_of_2

PAIRS_PER_PROGRAM = 8  #: (token, head) pairs of one program


@triton.jit(do_not_specialize=["count"])
def _merge_into(
    out,
    lse,
    part,
    part_lse,
    count,
    heads,
    lse_token,
    lse_head,
    part_lse_token,
    part_lse_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge ROWS (token, head) pairs of ``part`` into ``out``, and ``part_lse`` into ``lse``."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = pair < count
    token, head = pair // heads, pair % heads
    old_at = lse + token.to(tl.int64) * lse_token + head * lse_head
    old = tl.load(old_at, mask=real, other=0.0)
    new = tl.load(
        part_lse + token.to(tl.int64) * part_lse_token + head * part_lse_head, mask=real, other=0.0
    )
    top = tl.maximum(old, new)
    base = tl.where(top == float("-inf"), 0.0, top)
    old_weight, new_weight = tl.exp(old - base), tl.exp(new - base)
    total = old_weight + new_weight
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    column = tl.arange(0, BLOCK)
    at = pair.to(tl.int64)[:, None] * SIZE + column[None, :]
    inside = real[:, None] & (column < SIZE)[None, :]
    # NOTE: a state over no keys may contain NaN, so it is masked, not multiplied by zero
    before = tl.load(out + at, mask=inside & (old_weight > 0.0)[:, None], other=0.0)
    added = tl.load(part + at, mask=inside & (new_weight > 0.0)[:, None], other=0.0).to(tl.float32)
    tl.store(
        out + at,
        before * (old_weight * scale)[:, None] + added * (new_weight * scale)[:, None],
        mask=inside,
    )
    tl.store(old_at, base + tl.log(total), mask=real)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial state of attention into another in place.

    The reference is ``kernels.paged.merge_states_reference.merge_into``. ``out`` and ``part`` must
    be contiguous; the log-sum-exps may be strided.

    Args:
        out: float32 [T, H, D], overwritten
        lse: float32 [T, H], overwritten
        part: [T, H, D] of any floating dtype
        part_lse: [T, H]
    """
    tokens, heads, size = out.shape
    assert out.is_contiguous() and part.is_contiguous()
    if tokens:
        _merge_into[(cdiv(tokens * heads, PAIRS_PER_PROGRAM),)](
            out,
            lse,
            part,
            part_lse,
            tokens * heads,
            heads,
            *lse.stride(),
            *part_lse.stride(),
            SIZE=size,
            BLOCK=next_power_of_2(size),
            ROWS=PAIRS_PER_PROGRAM,
        )
