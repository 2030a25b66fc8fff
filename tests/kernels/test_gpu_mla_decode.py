"""Paged latent attention on a GPU at the published sizes, in bf16, FP8 and float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from glowplug.kernels.mla import decode_tiling
from tests.kernels.test_triton_mla_decode import Case
from tests.kernels.tree_masks import random_masks

pytestmark = pytest.mark.gpu
SIZES = {"lora": 512, "rope": 64}
LENGTHS = [1, 63, 64, 65, 700, 1025]


def chosen(case: Case, ring: bool | None = None) -> decode_tiling.MlaTiling:
    """Return the backend's tiling, with the kernel for Hopper or without."""
    fits = decode_tiling.pipeline_fits(
        case.query.dtype, case.kv.dtype, case.page, case.lora, 64, case.kv.device
    )
    if ring and not fits:
        pytest.skip("not for the kernel of Hopper")
    return decode_tiling.mla_tiling(
        len(case.lengths),
        case.width,
        case.heads,
        2048,
        case.query.dtype,
        case.kv.dtype,
        fits if ring is None else ring,
    )


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(
    "page,ring", [(1, False), (16, False), (64, False), (64, True), (128, True)]
)
def test_bfloat16(heads: int, width: int, page: int, ring: bool) -> None:
    case = Case(
        [n + width for n in LENGTHS],
        width,
        heads,
        page=page,
        dtype=torch.bfloat16,
        seed=width,
        **SIZES,
    )
    case.check(chosen(case, ring), 1e-2)
    case.check(replace(chosen(case, ring), splits=1), 1e-2)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40, 150, 224, 225, 256, 264])
def test_batches(rows: int, ring: bool) -> None:
    lengths = [int(n) for n in np.random.default_rng(rows).integers(1, 1500, rows)]
    case = Case(lengths, heads=16, page=64, dtype=torch.bfloat16, seed=rows, **SIZES)
    case.check(chosen(case, ring), 1e-2)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 16, 17])
def test_few_rows_of_many_heads(rows: int, kept: torch.dtype) -> None:
    lengths = [int(n) for n in np.random.default_rng(rows).integers(1, 2048, rows)]
    case = Case(lengths, heads=128, page=64, dtype=torch.bfloat16, seed=rows, **SIZES)
    case.kv = case.kv.to(kept)
    case.check(chosen(case, True), 1e-2)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("heads", [3, 16, 128])
def test_trees_and_a_first_key(heads: int, ring: bool) -> None:
    case = Case(
        [n + 7 for n in LENGTHS],
        7,
        heads,
        page=64,
        dtype=torch.bfloat16,
        first_key=1,
        seed=2,
        **SIZES,
    )
    random = np.random.default_rng(4).integers(0, 1 << 7, (len(LENGTHS), 7))
    case.tree = torch.from_numpy(random | 1 << np.arange(7)).cuda()
    case.check(chosen(case, ring), 1e-2)
    case.tree, case.tree_span = random_masks(len(LENGTHS), 7, 64).cuda(), 64
    case.check(chosen(case, ring), 1e-2)
    case.tree = None
    case.check(chosen(case, ring), 1e-2)
    case.lengths[1] = 0
    case.check(replace(chosen(case, ring), splits=1), 1e-2)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("heads,width", [(16, 1), (16, 2), (128, 1)])
def test_fp8_cache(heads: int, width: int, ring: bool) -> None:
    lengths = [n + width for n in LENGTHS]
    case = Case(
        lengths, width, heads, page=64, dtype=torch.bfloat16, seed=width, first_key=1, **SIZES
    )
    case.kv, case.kv_scale = case.kv.to(torch.float8_e4m3fn), 0.5
    case.check(chosen(case, ring), 1e-2)
    case.check(replace(chosen(case, ring), splits=1), 1e-2)


@pytest.mark.parametrize("page", [16, 64])
def test_float32(page: int) -> None:
    case = Case(LENGTHS, 1, 16, page=page, seed=3, **SIZES)
    case.check(chosen(case), 2e-5)


@pytest.mark.parametrize("ring", [False, True])
def test_replayed_from_a_graph_with_other_lengths_and_pages(ring: bool) -> None:
    case = Case([500, 64, 130], heads=16, page=64, dtype=torch.bfloat16, seed=5, **SIZES)
    cut = chosen(case, ring)
    case.check(cut, 1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(cut)
    for seed, lengths in [(5, [500, 64, 130]), (6, [1, 512, 65]), (7, [333, 1, 192])]:
        other = Case(lengths, heads=16, page=64, dtype=torch.bfloat16, seed=seed, **SIZES)
        case.query.copy_(other.query)
        case.lengths.copy_(other.lengths)
        case.table.zero_()
        case.table[:, : other.table.shape[1]] = other.table
        case.kv.zero_()
        count = min(case.kv.shape[0], other.kv.shape[0])
        case.kv[:count] = other.kv[:count].nan_to_num()
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, case.run(cut))
        case.check(cut, 1e-2)
