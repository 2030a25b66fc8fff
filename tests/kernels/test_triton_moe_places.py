"""Places of experts' rows, and tokens copied and activated there, against indexing."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.kernels.elementwise.activation_reference import silu_and_mul  # noqa: E402
from glowplug.kernels.formats import fp8, fp8_triton as fp8_quant  # noqa: E402
from glowplug.kernels.moe.fp8 import library_layouts as moe_places  # noqa: E402
from tests.support import uninterpreted  # noqa: E402

EXPERTS, WIDTH = 5, 3
SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.moe.fp8 import library_layouts as moe_places

kinds = dict(x="*fp8e4nv", x_scales="*fp32", values="*fp8e4nv", scales="*fp32", strides="*i64",
             **dict.fromkeys(("ids", "place", "counts", "sizes"), "*i32"))
for packed in (False, True):
    for ids in ("*i32", "*i64"):
        build(moe_places._find, {**kinds, "ids": ids},
              dict(PACKED=packed, SPAN=1024, DEPENDENT=True),
              ("hidden", "inter"), num_warps=4)
build(moe_places._spread, kinds, dict(PER_TOKEN=9, GROUPS=moe_places.GROUPS, DEPENDENT=True),
      ("depth", "x_stride"),
      num_warps=4)
build(moe_places._activate, {**kinds, "x": "*bf16"}, dict(GROUPS=moe_places.GROUPS, DEPENDENT=True),
      ("size",),
      num_warps=4)
"""


@pytest.mark.slow
def test_they_compile_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == ["_find"] * 4 + ["_spread", "_activate"]


def chosen(tokens: int, dtype: torch.dtype = torch.int32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:WIDTH] for _ in range(tokens)]
    ).to(dtype)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return ids.to(DEVICE)


def ranks(ids: Tensor) -> list[int]:
    """Return the number of pairs of the same expert before each pair."""
    flat = ids.flatten().tolist()
    return [flat[:pair].count(expert) for pair, expert in enumerate(flat)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 7, 400])
def test_places(tokens: int, dtype: torch.dtype) -> None:
    ids = chosen(tokens, dtype)
    here, ordered, rank = (
        (ids.flatten() >= 0).cpu(),
        ids.flatten().cpu().long(),
        torch.tensor(ranks(ids)),
    )
    counts = torch.bincount(ordered[here], minlength=EXPERTS)
    place, found = moe_places.static(ids, EXPERTS, 512)
    assert torch.equal(found.cpu().long(), counts)
    assert torch.equal(place.cpu().long()[here], (ordered * 512 + rank)[here])

    packed = moe_places.packed(ids, EXPERTS, 256, 384)
    starts = counts.cumsum(0) - counts
    assert torch.equal(packed.starts.cpu().long(), starts)
    assert torch.equal(packed.place.cpu().long()[here], (starts[ordered.clamp(min=0)] + rank)[here])
    assert packed.sizes.tolist() == [
        [[count, 768, 256] for count in counts.tolist()],
        [[count, 256, 384] for count in counts.tolist()],
    ]
    assert packed.strides.tolist() == [[256] * EXPERTS, [768] * EXPERTS, [384] * EXPERTS]


def test_rows_after_the_last_one_stay_with_their_expert() -> None:
    place, counts = moe_places.static(torch.ones(6, 1, dtype=torch.int32, device=DEVICE), 3, 4)
    assert counts.tolist() == [0, 4, 0] and sorted(place.tolist()) == [4, 5, 6, 7, 7, 7]


def buffers(static: bool, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Return values and scales of NaN, in either layout."""
    experts, each, groups = (
        (EXPERTS, rows, -(-size // 128)) if static else (1, rows, -(-size // 128))
    )
    values = torch.full((experts * each, size), torch.nan, device=DEVICE).to(torch.float8_e4m3fn)
    if static:
        return values, torch.full((experts, groups, each), torch.nan, device=DEVICE).transpose(1, 2)
    return values, torch.full((1, each, groups), torch.nan, device=DEVICE)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("tokens, size", [(1, 128), (7, 320), (12, 1280)])
def test_rows_are_copied_and_activated_at_the_places_of_pairs(
    static: bool, tokens: int, size: int
) -> None:
    ids = chosen(tokens)
    rows = 16 if static else ids.numel()
    place = (
        moe_places.static(ids, EXPERTS, rows)
        if static
        else moe_places.packed(ids, EXPERTS, 128, 128)
    ).place
    x, x_scales = fp8_quant.quantize(
        torch.randn(tokens, size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    )
    values, scales = buffers(static, rows, size)
    moe_places.spread(x, x_scales, ids, place, values, scales)
    here = (ids.flatten() >= 0).nonzero().flatten()
    at, flat = place[here].long(), scales.flatten(0, 1)
    assert torch.equal(values[at].float(), x[here // WIDTH].float()) and torch.equal(
        flat[at], x_scales[here // WIDTH]
    )
    other = torch.ones(len(values), dtype=torch.bool, device=DEVICE)
    other[at] = False
    assert values[other].float().isnan().all() and flat[other].isnan().all()

    wide = torch.full((len(values), 2 * size), torch.nan, device=DEVICE)
    wide[at] = torch.randn(len(at), 2 * size, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    values, scales = buffers(static, rows, size)
    moe_places.activate(wide, ids, place, values, scales)
    flat = scales.flatten(0, 1)
    found = values[at].float() * flat[at].repeat_interleave(128, 1)[:, :size]
    wanted = fp8.fake_quantize_tokens(silu_and_mul(wide[at]))
    assert torch.isfinite(found).all()
    assert (found - wanted).norm() <= (1e-2 if DEVICE == "cuda" else 0.06) * wanted.norm()
    assert values[other].float().isnan().all() and flat[other].isnan().all()
