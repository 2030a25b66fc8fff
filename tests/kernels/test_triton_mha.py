"""Paged multi-head attention in Triton against its definition: lengths around tiles and splits,
widths, trees, groups, odd sizes; ragged chunks with and without a cached prefix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.kernels.mha import reference as mha
from tests.kernels.shuffled_pages import shuffled_pages, slots_in_all
from tests.kernels.tree_masks import random_masks

pytest.importorskip("triton")
from glowplug.kernels.mha import decode as kernel
from glowplug.kernels.mha.prefill import mha_prefill

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


class Case:
    """A shuffled paged cache whose slots outside the rows' visible keys hold NaN, and queries
    over it.
    """

    def __init__(
        self,
        lengths: list[int],
        width: int = 1,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        first_key: int = 0,
        seed: int = 0,
        queries: list[int] | None = None,
    ) -> None:
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        table, kv_slots = shuffled_pages(lengths, page, rng, first_key)
        cache = torch.full((2, slots_in_all(lengths, page), kv_heads, dim), float("nan"))
        cache[:, :page] = 0
        for own in kv_slots:
            cache[:, own] = torch.randn(2, len(own), kv_heads, dim, generator=generator)
        self.counts = queries or [width] * len(lengths)
        wide = torch.randn(sum(self.counts), heads + 3, dim, generator=generator).to(DEVICE, dtype)
        self.query = wide[:, :heads]  # strided, as a fused projection leaves it
        self.k, self.v = cache.to(DEVICE, dtype)
        self.table = torch.from_numpy(table).to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.page, self.first_key, self.width, self.scale = page, first_key, width, dim**-0.5
        self.tree: Tensor | None = None
        self.tree_span = 0

    def cut(self, **changes: int) -> kernel.MhaTiling:
        heads, dim = self.query.shape[1:]
        made = kernel.mha_tiling(
            len(self.lengths), self.width, heads, self.k.shape[1], dim, 256, self.query.dtype
        )
        return replace(made, **changes)

    def expected(self) -> Tensor:
        """Compute the definition row by row: rows may differ in their numbers of queries."""
        parts, at = [], 0
        for row, count in enumerate(self.counts):
            own = slice(row, row + 1)
            parts.append(
                mha.paged_reference(
                    self.query[at : at + count],
                    self.k.float(),
                    self.v.float(),
                    self.table[own],
                    self.lengths[own],
                    self.scale,
                    self.page,
                    self.first_key,
                    None if self.tree is None else self.tree[own],
                    self.tree_span,
                )
            )
            at += count
        return torch.cat(parts)

    def check(self, cut: kernel.MhaTiling, tolerance: float = 1e-5) -> None:
        got = kernel.mha_decode(
            self.query,
            self.k,
            self.v,
            self.table,
            self.lengths,
            self.scale,
            self.page,
            cut,
            self.first_key,
            self.tree,
            self.tree_span,
        )
        torch.testing.assert_close(got.double(), self.expected(), rtol=tolerance, atol=tolerance)

    def check_prefill(self, skip: int = 0, tolerance: float = 1e-5) -> None:
        starts = torch.tensor([0, *np.cumsum(self.counts)], dtype=torch.int32, device=DEVICE) + skip
        got = mha_prefill(
            self.query,
            self.k,
            self.v,
            self.table,
            self.lengths,
            starts,
            self.scale,
            self.page,
            self.first_key,
            skip,
        )
        torch.testing.assert_close(got.double(), self.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_lengths_around_tiles_and_splits(splits: int) -> None:
    case = Case([1, 15, 16, 17, 48], seed=splits)
    case.check(case.cut(block_n=16, splits=splits))


@pytest.mark.parametrize("page", [1, 4, 7, 64])
def test_page_sizes(page: int) -> None:
    case = Case([33, 70], page=page, seed=page)
    case.check(case.cut(block_n=16, splits=2))


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("first_key", [0, 1])
def test_widths_are_causal(width: int, first_key: int) -> None:
    """Rows with fewer keys than query tokens are included: their first queries have no keys."""
    case = Case([width - 1, width, 17, 32 + width], width=width, first_key=first_key, seed=width)
    case.check(case.cut(block_n=16, splits=2))


def test_trees() -> None:
    case = Case([7, 20, 37], width=7, seed=4)
    random = np.random.default_rng(4).integers(0, 1 << 7, (3, 7))
    case.tree = torch.from_numpy(random | 1 << np.arange(7)).to(DEVICE)
    case.check(case.cut(block_n=16, splits=2))


@pytest.mark.parametrize(("width", "span"), [(1, 5), (3, 20), (2, 64)])
@pytest.mark.parametrize("first_key", [0, 1])
def test_masks_name_keys_of_earlier_passes(width: int, span: int, first_key: int) -> None:
    """With 64 keys every mask has its sign bit set; one row has fewer keys than its mask names."""
    case = Case([19, 64, 70], width=width, first_key=first_key, seed=span)
    case.tree, case.tree_span = random_masks(3, width, span).to(DEVICE), span
    case.check(case.cut(block_n=16, splits=2))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 24), (7, 1, 16), (6, 2, 10)])
def test_groups_and_odd_sizes(heads: int, kv_heads: int, dim: int) -> None:
    case = Case([19, 34], width=3, heads=heads, kv_heads=kv_heads, dim=dim, seed=dim)
    case.check(case.cut(block_m=16, block_n=16, splits=2))


def test_rows_without_keys_are_zero() -> None:
    """These are padding rows of length 0, and a draft's first token, whose only position is before
    the first key.
    """
    for splits in (1, 2):
        case = Case([1, 18], first_key=1, seed=5)
        case.check(case.cut(block_n=16, splits=splits))
        case.lengths[0] = 0
        case.check(case.cut(block_n=16, splits=splits))


def test_lengths_may_change_between_runs() -> None:
    case = Case([40, 33], seed=6)
    for lengths in ([40, 33], [3, 17], [16, 1]):
        case.lengths.copy_(torch.tensor(lengths))
        case.check(case.cut(block_n=16, splits=3))


def test_half_precision() -> None:
    case = Case([50, 3], width=2, dtype=torch.float16, seed=7)
    case.check(case.cut(block_n=16, splits=2), 3e-3)


@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize("page", [7, 16])
def test_ragged_chunks(page: int, first_key: int) -> None:
    """The chunks are fresh prompts, chunks after a prefix, a single token, and more than a block of
    queries.
    """
    queries = [5, 40 - first_key, 1, 33]
    case = Case(
        [5 + first_key, 40, 21, 60],
        queries=queries,
        page=page,
        first_key=first_key,
        heads=2,
        kv_heads=1,
        seed=page,
    )
    case.check_prefill(skip=3)


def test_a_chunk_without_keys_is_zero() -> None:
    case = Case([17, 20], queries=[4, 20], heads=2, dim=24, seed=8)
    case.lengths[0] = 0
    case.check_prefill()
