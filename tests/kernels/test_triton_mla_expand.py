"""Keys and values expanded where attention reads them, against the definition: in the interpreter,
or on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.mla import expand as mla_expand, reference as mla

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


def case(
    tokens: int,
    heads: int,
    nope: int,
    value: int,
    lora: int,
    turned: int,
    dtype: torch.dtype,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return entries, which are rows of a larger tensor, and the weight."""
    generator = torch.Generator().manual_seed(seed)
    entries = torch.randn(tokens + 3, lora + turned, generator=generator).to(DEVICE, dtype)[
        2 : tokens + 2
    ]
    return entries, (torch.randn(heads, nope + value, lora, generator=generator) * lora**-0.5).to(
        DEVICE, dtype
    )


def check(entries: Tensor, w_kv: Tensor, nope: int, error: float) -> None:
    lora = w_kv.shape[2]
    want = torch.einsum("mc,hrc->mhr", entries[:, :lora].double(), w_kv.double())
    for expand in (mla.expand, mla_expand.expand):
        k, v = expand(entries, w_kv, nope)
        latent, turned = k[..., :nope], k[..., nope:]
        assert torch.equal(turned, entries[:, None, lora:].expand_as(turned)), (
            "the rotary part is copied unchanged"
        )
        torch.testing.assert_close(
            torch.cat((latent, v), -1).double(), want, rtol=error, atol=error
        )
        assert k.stride(-1) == v.stride(-1) == 1


SIZES = [
    (3, 3, 8, 6, 16, 4),
    (70, 2, 4, 4, 24, 6),
    (5, 17, 8, 8, 16, 8),
    (5, 3, 4, 8, 16, 4),
    (0, 2, 8, 8, 16, 4),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_expansion_equals_its_definition(sizes: tuple[int, ...]) -> None:
    """The keys' latent parts and the values have one size or two."""
    for seed in (0, 1):
        check(*case(*sizes, dtype=torch.float32, seed=seed), nope=sizes[2], error=1e-5)


def test_only_the_rotary_part_is_written() -> None:
    """Keys are at any place in a wider tensor."""
    keys = torch.full((5, 4, 12), NAN, device=DEVICE)
    rotary = torch.randn(5, 9, device=DEVICE)[:, 2:8]
    mla_expand.copy_rotary(rotary, keys[:, ::2, 3:9])
    assert torch.equal(keys[:, ::2, 3:9], rotary[:, None].expand(-1, 2, -1))
    keys[:, ::2, 3:9] = NAN
    assert keys.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens,heads,value", [(1, 16, 128), (77, 16, 64), (1030, 16, 128), (300, 128, 128)]
)
def test_at_published_sizes(tokens: int, heads: int, value: int) -> None:
    for seed in (0, 1):
        check(*case(tokens, heads, 128, value, 512, 64, torch.bfloat16, seed), nope=128, error=2e-2)
