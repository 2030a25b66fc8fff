"""Paged latent attention against its definition: lengths around tiles and splits, widths, trees,
layouts, caches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.kernels.launch import cuda_arch
from glowplug.kernels.mla import reference as mla
from glowplug.plugins.attention.shared import decode_choice
from tests.kernels.shuffled_pages import shuffled_pages, slots_in_all
from tests.kernels.tree_masks import random_masks

pytest.importorskip("triton")
from glowplug.kernels.mla import (
    decode as kernel,
    decode_tiling,
    head_gemms,
    value_projection as mla_values,
)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


class Case:
    """A shuffled paged cache whose slots outside the rows' visible keys hold NaN, and queries over
    it.
    """

    def __init__(
        self,
        lengths: list[int],
        width: int = 1,
        heads: int = 3,
        lora: int = 32,
        rope: int = 16,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        first_key: int = 0,
        seed: int = 0,
        spare: int = 0,
    ) -> None:
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        table, kv_slots = shuffled_pages(lengths, page, rng, first_key, spare)
        kv = torch.full((slots_in_all(lengths, page), lora + rope), float("nan"))
        kv[:page] = 0
        for own in kv_slots:
            kv[own] = torch.randn(len(own), lora + rope, generator=generator)
        self.query = torch.randn(len(lengths) * width, heads, lora + rope, generator=generator).to(
            DEVICE, dtype
        )
        self.kv, self.table = kv.to(DEVICE, dtype), torch.from_numpy(table).to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.width, self.heads, self.lora, self.page, self.first_key = (
            width,
            heads,
            lora,
            page,
            first_key,
        )
        self.scale, self.tree = (lora + rope) ** -0.5, None
        self.tree_span = 0
        self.kv_scale = 1.0

    def cut(self, **changes: int) -> decode_tiling.MlaTiling:
        made = decode_tiling.mla_tiling(
            len(self.lengths), self.width, self.heads, 256, self.query.dtype, self.kv.dtype
        )
        return replace(made, **changes)

    def run(self, cut: decode_tiling.MlaTiling) -> Tensor:
        return kernel.mla_decode(
            self.query,
            self.kv,
            self.table,
            self.lengths,
            self.scale,
            self.page,
            self.lora,
            cut,
            self.first_key,
            self.tree,
            self.tree_span,
            self.kv_scale,
        )

    def check(self, cut: decode_tiling.MlaTiling, tolerance: float = 1e-5) -> None:
        cache = self.kv.float() * self.kv_scale
        expected = mla.paged_latent_reference(
            self.query,
            cache,
            self.table,
            self.lengths,
            self.scale,
            self.page,
            self.lora,
            self.first_key,
            self.tree,
            self.tree_span,
        )
        torch.testing.assert_close(self.run(cut).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_lengths_around_tiles_and_splits(parts: int, splits: int) -> None:
    case = Case([1, 15, 16, 17, 48], seed=splits)
    case.check(case.cut(block_n=16, splits=splits, latent_tiles=parts))


@pytest.mark.parametrize("page", [1, 4, 7, 64])
def test_page_sizes(page: int) -> None:
    case = Case([33, 70], page=page, seed=page, spare=3)
    case.check(case.cut(block_n=16, splits=2))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("first_key", [0, 1])
def test_widths_are_causal(parts: int, width: int, first_key: int) -> None:
    """Rows with fewer keys than query tokens are included: their first queries have no keys."""
    case = Case([width - 1, width, 17, 32 + width], width=width, first_key=first_key, seed=width)
    case.check(case.cut(block_n=16, splits=2, latent_tiles=parts))


@pytest.mark.parametrize("parts", [1, 2])
def test_trees(parts: int) -> None:
    case = Case([7, 20, 37], width=7, heads=4, seed=4)
    random = np.random.default_rng(4).integers(0, 1 << 7, (3, 7))
    case.tree = torch.from_numpy(random | 1 << np.arange(7)).to(DEVICE)
    case.check(case.cut(block_n=16, splits=2, latent_tiles=parts))


@pytest.mark.parametrize(("width", "span"), [(1, 5), (3, 20), (2, 64)])
@pytest.mark.parametrize("first_key", [0, 1])
def test_masks_name_keys_of_earlier_passes(width: int, span: int, first_key: int) -> None:
    """With 64 keys every mask has its sign bit set; one row has fewer keys than its mask names."""
    case = Case([19, 64, 70], width=width, first_key=first_key, seed=span)
    case.tree, case.tree_span = random_masks(3, width, span).to(DEVICE), span
    case.check(case.cut(block_n=16, splits=2))


def test_a_chain_is_a_tree() -> None:
    case = Case([9, 26], width=4, seed=1)
    causal = case.run(case.cut(block_n=16))
    case.tree = torch.tensor([[1, 3, 7, 15]] * 2, device=DEVICE)
    torch.testing.assert_close(case.run(case.cut(block_n=16)), causal)


def test_more_pairs_than_a_block() -> None:
    case = Case([40, 3], width=3, heads=7, seed=2)
    case.check(case.cut(block_m=16, block_n=16, splits=2))


def test_odd_sizes() -> None:
    case = Case([19, 34], heads=3, lora=24, rope=6, page=16, seed=3)
    case.check(case.cut(block_n=16, splits=2))


def test_rows_without_keys_are_zero() -> None:
    """These are padding rows of length 0, and a draft's first token, whose only position is before
    the first key.
    """
    for splits in (1, 2):
        case = Case([1, 18], first_key=1, seed=5)
        case.check(case.cut(block_n=16, splits=splits))
        case.lengths[0] = 0
        case.check(case.cut(block_n=16, splits=splits))


def test_half_precision() -> None:
    case = Case([50, 3, 32], width=2, dtype=torch.float16, seed=6)
    case.check(case.cut(block_n=16, splits=2), 3e-3)


def test_lengths_may_change_between_runs() -> None:
    case = Case([40, 48], seed=7)
    case.check(case.cut(block_n=16, splits=3))
    case.lengths.copy_(torch.tensor([1, 17]))
    case.check(case.cut(block_n=16, splits=3))


def test_an_fp8_cache() -> None:
    case = Case([33, 5], seed=8)
    case.kv, case.kv_scale = case.kv.to(torch.float8_e4m3fn), 0.5
    case.check(case.cut(block_n=16, splits=2))


@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize(
    "rows,splits,heads", [(1, 2, 3), (7, 9, 3), (9, 3, 3), (4, 10, 3), (2, 17, 3), (3, 9, 9)]
)
def test_parts_joined_by_the_values_product(
    rows: int, splits: int, heads: int, first_key: int
) -> None:
    """The reference merges the splits, then multiplies by W_UV; rows without keys or with fewer
    splits have NaN in the memory of the others.
    """
    lengths = [[1, 16, 17, 150, 129, 40, 33, 64, 5][(row + splits) % 9] for row in range(rows)]
    case = Case(lengths, heads=heads, lora=64, rope=16, first_key=first_key, seed=rows)
    case.lengths[rows // 2] = 0 if rows > 1 else 1
    cut = case.cut(block_n=16, splits=splits)
    both = (
        torch.randn(heads, 96, 64, generator=torch.Generator().manual_seed(splits)).to(DEVICE) / 8
    )
    w_uv = both[:, 32:].transpose(1, 2)
    out, wanted = (torch.full((rows, heads, 64), float("nan"), device=DEVICE) for _ in range(2))
    partial, lse = parts_of(case, cut)
    assert partial.isnan().any(), "not every row has every part"
    mla_values.merge_and_project(partial, lse, case.lengths, w_uv, out, cut.block_n)
    head_gemms.by_heads(case.run(cut), w_uv, wanted, 32, False)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    assert out[rows // 2].eq(0).all() == (rows > 1 or first_key == 1)
    exact = mla.paged_latent_reference(
        case.query, case.kv.float(), case.table, case.lengths, case.scale, case.page, 64, first_key
    )
    exact = mla.project_output(exact, w_uv.double()).view_as(out)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


def parts_of(case: Case, cut: decode_tiling.MlaTiling) -> tuple[Tensor, Tensor]:
    """``decode_splits``, with NaN where by its contract nothing is written."""
    made = kernel.decode_splits(
        case.query,
        case.kv,
        case.table,
        case.lengths,
        case.scale,
        case.page,
        case.lora,
        cut,
        case.first_key,
        case.tree,
        case.tree_span,
        case.kv_scale,
    )
    for row, length in enumerate(case.lengths.tolist()):
        tiles = -(-length // cut.block_n)
        held = -(-tiles // max(1, -(-tiles // cut.splits)))
        for part in made:
            part[row, :, held:] = float("nan")
    return made


def test_the_values_gemm_needs_whole_shares() -> None:
    assert mla_values.sizes_fit(512, 128) and mla_values.sizes_fit(256, 96)
    assert not (
        mla_values.sizes_fit(512, 100)
        or mla_values.sizes_fit(384, 128)
        or mla_values.sizes_fit(32, 32)
    )


def test_the_tiling_fills_the_device() -> None:
    """At least two thirds of the multiprocessors have work in the waves it takes, unless a row is
    too short.
    """
    half = torch.bfloat16
    for rows, width, heads in [
        (1, 1, 16),
        (8, 1, 16),
        (32, 2, 16),
        (70, 1, 16),
        (128, 1, 128),
        (3, 7, 5),
    ]:
        for ring in (False, True):
            cut = decode_tiling.mla_tiling(rows, width, heads, 1 << 14, half, half, ring)
            programs = rows * -(-width * heads // cut.block_m) * cut.splits
            assert cut.splits <= (1 << 14) // cut.block_n
            assert programs / (-(-programs // 132) * 132) > 2 / 3
    assert decode_tiling.mla_tiling(1, 1, 16, 64, half, half, True).splits == 1


def test_a_step_of_some_rows_has_no_more_splits_than_are_merged() -> None:
    parts = {
        rows: decode_tiling.mla_tiling(
            rows, 1, 16, 4096, torch.bfloat16, torch.bfloat16, True
        ).splits
        for rows in (1, 7, 8, 12, 32, 66, 128)
    }
    assert (
        parts[1]
        > parts[7]
        > decode_tiling.LAST_PROGRAM_SPLITS_MAX
        == parts[8]
        == parts[12]
        > parts[32]
        > parts[66]
        > parts[128]
        == 1
    )
    assert (
        decode_tiling.mla_tiling(8, 1, 16, 1 << 14, torch.bfloat16, torch.bfloat16, True).splits
        > decode_tiling.LAST_PROGRAM_SPLITS_MAX
    )
    others = (
        decode_tiling.mla_tiling(8, 1, 128, 1 << 14, torch.bfloat16, torch.bfloat16, True),
        decode_tiling.mla_tiling(8, 1, 16, 4096, torch.bfloat16, torch.bfloat16),
    )
    assert others[0].block_m == 64 and others[1].splits > decode_tiling.LAST_PROGRAM_SPLITS_MAX


def test_splits_are_left_to_the_values_gemm_where_that_was_measured() -> None:
    half, narrow = torch.bfloat16, torch.float8_e4m3fn

    def cut(
        rows: int,
        width: int = 1,
        heads: int = 16,
        context: int = 4096,
        kv: torch.dtype = half,
        ring: bool = True,
        apart: bool = True,
    ) -> decode_tiling.MlaTiling:
        return decode_tiling.mla_tiling(rows, width, heads, context, half, kv, ring, apart)

    assert {rows: cut(rows).splits for rows in (8, 16, 32)} == {8: 9, 16: 8, 32: 4}
    assert all(
        cut(rows, heads=heads, kv=kv).merge_in_values
        for rows in range(8, 33)
        for heads in (8, 16)
        for kv in (half, narrow)
    )
    assert all(cut(rows, heads=heads).merge_in_values for rows in range(1, 8) for heads in (5, 8))
    others = (
        cut(1),
        cut(7),
        cut(7, heads=9),
        cut(33),
        cut(128),
        cut(8, width=2),
        cut(8, width=2, heads=8),
        cut(8, heads=32),
        cut(9, heads=128),
        cut(1, width=2, heads=128),
        cut(1, heads=64),
        cut(8, context=cuda_arch.SHORT_KEYS_MAX + 1),
        cut(8, heads=128, context=cuda_arch.SHORT_KEYS_MAX + 1),
        cut(8, ring=False),
        cut(8, heads=128, ring=False),
        cut(8, context=64),
        cut(8, apart=False),
    )
    assert (
        not any(other.merge_in_values for other in others)
        and others[-1].splits == decode_tiling.LAST_PROGRAM_SPLITS_MAX
    )


def test_few_rows_of_many_heads_have_narrow_tiles() -> None:
    """There is about a program for every multiprocessor, with splits that W_UV's GEMM may merge."""
    half = torch.bfloat16
    for kv in (half, torch.float8_e4m3fn):
        cuts = {
            rows: decode_tiling.mla_tiling(rows, 1, 128, 4096, half, kv, True, True)
            for rows in (1, 2, 4, 5, 8, 9, 16, 17, 32)
        }
        assert {rows: cut.block_m for rows, cut in cuts.items()} == {
            1: 16,
            2: 16,
            4: 16,
            5: 32,
            8: 32,
            9: 32,
            16: 32,
            17: 64,
            32: 64,
        }
        assert [cuts[rows].splits for rows in (1, 2, 4, 8, 16)] == [16, 8, 4, 4, 2]
        assert [rows for rows, cut in cuts.items() if cut.merge_in_values] == [1, 2, 4, 5, 8]
        assert all(cut.warps == (8 if cut.block_m == 64 else 4) for cut in cuts.values())


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 65, 100, 128, 256])
def test_short_rows_are_those_decoded_differently(heads: int) -> None:
    """Both the choice of kernels for an H200 and our kernel's tiling count, except its number of
    splits.
    """

    def decoded(rows: int, longest: int) -> tuple[str, object]:
        cut = decode_tiling.mla_tiling(
            rows, 1, heads, longest, torch.bfloat16, torch.bfloat16, True, True
        )
        who = decode_choice.fastest(heads, rows, longest)
        return who, who == "triton" and (cut.merge_in_values, cut.block_m)

    differ = [
        rows
        for rows in range(1, 300)
        if decoded(rows, decode_choice.SHORT_KEYS_MAX) != decoded(rows, 1 << 17)
    ]
    assert differ == list(decode_choice.short_rows(heads))
