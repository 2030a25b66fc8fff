"""Parts merged and taken to values in one launch: against the definition, in the interpreter or on a GPU."""
from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from glowplug.kernels.triton import mla_values

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


@pytest.mark.parametrize(("rows", "width", "heads", "size", "columns", "splits", "tile"), [
    (2, 1, 3, 16, 5, 4, 8), (1, 2, 2, 24, 20, 7, 16), (3, 1, 1, 512, 32, 16, 64), (0, 1, 2, 16, 4, 3, 8)])
def test_it_gives_what_merging_and_multiplying_give(rows: int, width: int, heads: int, size: int, columns: int,
                                                    splits: int, tile: int) -> None:
    """Parts behind the last that a row's length fills hold NaN: they were never written."""
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        tokens = rows * width
        lens = torch.randint(0, 3 * splits * tile, (rows,), generator=generator)
        partial = torch.randn(tokens, heads, splits, size, generator=generator)
        lse = torch.randn(tokens, heads, splits, generator=generator) * 9
        weight = torch.randn(heads, columns, size, generator=generator).transpose(1, 2)
        expected = torch.zeros(tokens, heads, columns, dtype=torch.float64)
        for token in range(tokens):
            tiles = -(-int(lens[token // width]) // tile)
            count = -(-tiles // max(-(-tiles // splits), 1))
            partial[token, :, count:], lse[token, :, count:] = NAN, NAN
            if count:
                share = torch.softmax(lse[token, :, :count].double() * torch.log(torch.tensor(2.0).double()), dim=-1)
                latent = torch.einsum("hs,hsc->hc", share, partial[token, :, :count].double())
                expected[token] = torch.einsum("hc,hcv->hv", latent, weight.double())
        out = torch.full((tokens, heads, columns), NAN, device=DEVICE)
        mla_values.merge_to_values(partial.to(DEVICE), lse.to(DEVICE), lens.int().to(DEVICE), weight.to(DEVICE), out,
                                   width * heads, tile)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-4)
