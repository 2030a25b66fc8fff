"""Latent attention over a paged cache, few query tokens a row: decode, verify and draft steps of
MLA.

One key head of C + R numbers serves every query head and its first C numbers are the value too, so
a tile of the cache is loaded once and multiplied twice, and the query heads of a row (times its
query tokens) fill a block of the tensor cores. The cache of a row is divided among ``splits``
programs whose partial results ``mla_merge`` joins, or the last of them, or W_UV's product
(``mla_values``); the grid depends on the padded batch only, lengths are read on the device
(FlashDecoding, Dao 2023; FlashMLA, DeepSeek-AI 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.cuda_arch import APART_ROWS, MANY_HEADS, MULTIPROCESSORS, SHORT
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.mla.merge_splits import merge
from glowplug.kernels.paged import page_table as paged

#: parts of a row's keys up to which who ends last joins them (not of tiles of 32 pairs: never
#: measured)
JOINED = 8
APART = 9  #: parts at most that W_UV's product joins instead, in steps of APART_ROWS rows
#: of few short rows of many heads: (blocks of this many pairs at most, pairs of a block), so that
#: there is about a program for every processor
NARROW = ((33, 16), (64, 32))
MANY_APART = range(
    1, 9
)  #: in steps of so many such rows W_UV's product joins the parts; with 128 heads on an H200
TICKETS = 1 << 16


@triton.jit
def _part(at, filled, C: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr):
    """Numbers ``FIRST`` to ``FIRST + SIZE`` of the rows of C numbers at ``at``, zeros where there
    are none.
    """
    c = FIRST + tl.arange(0, SIZE)
    if C >= FIRST + SIZE:
        return tl.load(at[:, None] + c[None, :], mask=filled[:, None], other=0.0)
    return tl.load(at[:, None] + c[None, :], mask=filled[:, None] & (c[None, :] < C), other=0.0)


@triton.jit(do_not_specialize=["splits", "first_key", "width", "table_stride"])
def mla_decode_kernel(
    query,
    kv,
    page_table,
    kv_lens,
    tree_mask,
    out,
    lse,
    scale,
    kv_scale,
    splits,
    first_key,
    width,
    heads,
    table_stride,
    kv_stride: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program: ``BLOCK_M`` (query token, head) pairs of a row, one split of its keys.

    Softmax in base 2: ``scale`` carries log2(e) and the cache's scale. Writes ``out`` at [pair, C]
    if there is one split, else at [pair, split, C], and ``lse`` (base 2) at [pair, split]. The
    latent lies in ``PARTS`` tiles
    of ``BLOCK_C``: short products that do not wait for each other.
    """
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    block, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + row)
    each = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    start = split * each
    end = tl.minimum(start + each, length)
    if SPLIT:
        if start >= end:
            return
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = pair < width * heads
    own = pair // heads
    at = (row * width * heads + pair).to(tl.int64)
    q_at = query + at * (C + R)
    q_r = _part(q_at + C, real, R, BLOCK_R, 0)
    q_c, acc = (), ()
    for part in tl.static_range(PARTS):
        q_c = q_c + (_part(q_at, real, C, BLOCK_C, part * BLOCK_C),)
        acc = acc + (tl.zeros([BLOCK_M, BLOCK_C], tl.float32),)
    tree = tl.load(tree_mask + row * width + own, mask=real, other=1) if TREE else own
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        filled = (n0 + n >= first_key) & (n0 + n < end)
        entry = paged.entries(
            kv, page_table + row * table_stride, n0, n, end, kv_stride, PAGE, BLOCK_N
        )
        latent = ()
        for part in tl.static_range(PARTS):
            latent = latent + (_part(entry, filled, C, BLOCK_C, part * BLOCK_C).to(q_r.dtype),)
        rope = _part(entry + C, filled, R, BLOCK_R, 0).to(q_r.dtype)
        # NOTE: scaled before they are summed: a bare sum of products becomes one chain that waits
        # for each of its links
        scores = tl.dot(q_r, tl.trans(rope), input_precision=PRECISION) * scale
        for part in tl.static_range(PARTS):
            scores += tl.dot(q_c[part], tl.trans(latent[part]), input_precision=PRECISION) * scale
        seen = paged.visible(n0 + n, length - width, own, tree, first_key, end, TREE)
        weights, kept, top, total = paged.weights(tl.where(seen, scores, float("-inf")), top, total)
        summed = ()
        for part in tl.static_range(PARTS):
            summed = summed + (
                tl.dot(
                    weights.to(q_r.dtype), latent[part], acc[part] * kept, input_precision=PRECISION
                ),
            )
        acc = summed
    norm = tl.sum(total, axis=1)
    inverse = (kv_scale / tl.where(norm == 0.0, 1.0, norm))[:, None]
    line = at * splits + split
    for part in tl.static_range(PARTS):
        c = part * BLOCK_C + tl.arange(0, BLOCK_C)
        tl.store(
            out + line[:, None] * C + c[None, :],
            (acc[part] * inverse).to(out.dtype.element_ty),
            mask=real[:, None] & (c < C)[None, :],
        )
    if SPLIT:
        tl.store(lse + line, top + tl.log2(norm), mask=real)


@dataclass(frozen=True)
class Tiling:
    """How a decode step is cut: constants of the kernels, fixed by what a captured graph fixes.

    ``ring``: by the kernel for Hopper, whose tiles have 64 keys and ``stages`` of them are in
    shared memory. ``apart``: parts of a row's keys are left to W_UV's product to be joined.
    """

    block_m: int
    block_n: int
    splits: int
    parts: int
    warps: int
    stages: int
    ring: bool = False
    apart: bool = False


@lru_cache(maxsize=4096)
def tiling(
    rows: int,
    width: int,
    heads: int,
    context: int,
    dtype: torch.dtype,
    kv: torch.dtype,
    ring: bool = False,
    apart: bool = False,
) -> Tiling:
    """For ``rows`` (padded) rows of ``width`` query tokens, ``heads`` heads, rows of ``context``
    keys at most.

    ``apart``: parts may be left to W_UV's product, where that was measured to be faster. On an H200
    at 1024 keys, from
    the prologue to W_UV: 17.3 to 15.6 us with 8 rows (9 parts), 19.9 to 18.3 with 16 (8), 24.7 to
    23.6 with 32 (4). Few rows of more than ``MANY_HEADS`` heads: blocks of heads are narrow, which
    read keys again, but from L2.
    """
    block_m = min(64 if dtype.itemsize <= 2 else 32, max(16, next_power_of_2(width * heads)))
    many = ring and width == 1 and heads > MANY_HEADS and context <= SHORT
    if many:
        block_m = next(
            (narrow for most, narrow in NARROW if rows * cdiv(heads, narrow) <= most), block_m
        )
    blocks = max(1, rows * cdiv(width * heads, block_m))
    wide = block_m == 64
    narrow = kv.itemsize == 1
    block_n = (
        64 if ring or wide else 16 if dtype.itemsize > 2 else 32 if narrow or block_m > 16 else 64
    )
    splits = paged.best_splits(blocks, cdiv(context, block_n), MULTIPROCESSORS)
    spared = ring and block_m == 16 and blocks >= JOINED and context <= SHORT and not many
    apart = (
        apart
        and splits > 1
        and width == 1
        and (rows in MANY_APART and not wide if many else spared and rows in APART_ROWS)
    )
    # to spare the merge is worth more than a part for every processor: of 8 rows of 1024 keys on an
    # H200
    if spared:
        # 17.1 us joined, 20.8 us in 16 parts and merged
        splits = min(splits, APART if apart else JOINED)
    if ring:
        return Tiling(
            block_m,
            block_n,
            splits,
            1,
            8 if wide else 4,
            3 if narrow and not wide else 2,
            True,
            apart,
        )
    if dtype.itemsize > 2:
        return Tiling(block_m, block_n, splits, 4, 4, 3)
    return (
        Tiling(block_m, block_n, splits, 1, 8, 2)
        if wide
        else Tiling(block_m, block_n, splits, 4, 4, 5)
    )


def ring_fits(
    query: torch.dtype, kv: torch.dtype, page_size: int, lora: int, rope: int, device: torch.device
) -> bool:
    """May the kernel for Hopper be used? It copies whole tiles, and multiplies 16-bit numbers."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and query.itemsize == 2
        and kv in (query, torch.float8_e4m3fn)
        and page_size % 64 == 0
        and lora in (256, 512)
        and rope == 64
    )


@cache
def _tickets(device: torch.device) -> Tensor:
    """NOTE: one for all streams of a device, so two steps must not decode at once on it; made
    before any capture.
    """
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


def mla_decode(
    query: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    lora: int,
    cut: Tiling,
    first_key: int = 0,
    tree: Tensor | None = None,
    kv_scale: float = 1.0,
) -> Tensor:
    """Absorbed queries [B * W, H, C + R] over the cache kv [slots, C + R] -> [B * W, H, C] in the
    query's dtype.

    page_table int32 [B, P], kv_lens int32 [B] on the device; W is what B leaves of the tokens.
    Query token i of a row sees the keys from ``first_key`` to the row's last but W - 1 - i, or with
    ``tree`` int64 [B, W] those before the row's W own tokens, and own token j where bit j is set.
    ``kv_scale`` multiplies what an FP8 cache holds.
    """
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, lora)
    if not tokens:
        return out
    if cut.splits == 1:
        _launch(
            query,
            kv,
            page_table,
            kv_lens,
            scale,
            page_size,
            cut,
            first_key,
            tree,
            kv_scale,
            out,
            kv_lens,
            None,
        )
        return out
    joins = cut.ring and cut.block_m != 32 and cut.splits <= JOINED and tokens * heads <= TICKETS
    partial, lse = decode_parts(
        query,
        kv,
        page_table,
        kv_lens,
        scale,
        page_size,
        lora,
        cut,
        first_key,
        tree,
        kv_scale,
        out if joins else None,
    )
    if not joins:
        merge(partial, lse, kv_lens, out, tokens // len(kv_lens) * heads, cut.block_n)
    return out


def decode_parts(
    query: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    lora: int,
    cut: Tiling,
    first_key: int = 0,
    tree: Tensor | None = None,
    kv_scale: float = 1.0,
    joined: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``mla_decode``, but what each of more than one ``cut.splits`` found: [B * W, H, S, C] in
    the query's dtype and the scores' log-sum-exps, float32 [B * W, H, S] in base 2.

    Rows of few tiles of ``cut.block_n`` keys have fewer parts than S; what lies behind theirs is
    not written. Into ``joined`` [B * W, H, C], if given, Hopper's kernel joins them as well.
    """
    tokens, heads, _ = query.shape
    partial = query.new_empty(tokens, heads, cut.splits, lora)
    lse = torch.empty((tokens, heads, cut.splits), dtype=torch.float32, device=query.device)
    if tokens:
        _launch(
            query,
            kv,
            page_table,
            kv_lens,
            scale,
            page_size,
            cut,
            first_key,
            tree,
            kv_scale,
            partial,
            lse,
            joined,
        )
    return partial, lse


def _launch(
    query: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    cut: Tiling,
    first_key: int,
    tree: Tensor | None,
    kv_scale: float,
    out: Tensor,
    lse: Tensor,
    joined: Tensor | None,
) -> None:
    (tokens, heads, size) = query.shape
    rows = kv_lens.shape[0]
    lora = out.shape[-1]
    assert query.is_contiguous() and kv.stride(1) == 1
    pairs = tokens // rows * heads
    splits = cut.splits
    grid = (cdiv(pairs, cut.block_m), rows, splits)
    rows_of = (page_table, kv_lens, tree if tree is not None else kv_lens, out, lse)
    rest = (
        scale * kv_scale * paged.LOG2_E,
        kv_scale,
        splits,
        first_key,
        tokens // rows,
        heads,
        page_table.stride(0),
    )
    same = {
        "C": lora,
        "R": size - lora,
        "BLOCK_M": cut.block_m,
        "PAGE": page_size,
        "SPLIT": splits > 1,
        "TREE": tree is not None,
        "num_warps": cut.warps,
        **dependent.options(),
    }
    if cut.ring:
        from glowplug.kernels.mla import decode_hopper as hopper

        described = hopper.described(kv, lora)
        hopper.mla_decode_hopper_kernel[grid](
            query,
            *described,
            *rows_of,
            out if joined is None else joined,
            _tickets(query.device),
            *rest,
            RING=cut.stages,
            JOIN=0 if joined is None else splits,
            FLAT=cut.apart,
            **same,
        )
        return
    mla_decode_kernel[grid](
        query,
        kv,
        *rows_of,
        *rest,
        kv_stride=kv.stride(0),
        BLOCK_C=max(16, next_power_of_2(cdiv(lora, cut.parts))),
        BLOCK_R=max(16, next_power_of_2(size - lora)),
        PARTS=cut.parts,
        BLOCK_N=cut.block_n,
        STAGES=cut.stages,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        num_stages=cut.stages,
        **same,
    )
