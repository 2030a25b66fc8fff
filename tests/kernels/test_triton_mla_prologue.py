"""The prologue of latent attention in Triton against the reference: in the interpreter, or on a
GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.elementwise import rope_reference as rope
from glowplug.kernels.formats.fp8 import dequantize_weight
from glowplug.kernels.mla import head_gemms, prologue as mla_prologue, reference as mla
from tests.kernels.test_triton_mla_absorbed_fp8 import stored

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


class Case:
    """Projections of a step in a layer's layout: two views of one wide tensor."""

    def __init__(
        self,
        tokens: int,
        decode: int,
        heads: int,
        nope: int,
        lora: int,
        turned: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
        kept: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = heads * (nope + turned)
        wide = torch.randn(tokens, size + lora + turned + 3, generator=generator).to(DEVICE, dtype)
        self.query = wide[:, :size].view(tokens, heads, nope + turned)
        self.compressed = wide[:, size : size + lora + turned]
        self.weight = torch.randn(lora, generator=generator).to(DEVICE, dtype)
        frequencies = rope.inverse_frequencies(turned, 10000.0)[0]
        table = rope.cos_sin_table(frequencies, 1.1, 100)
        self.cos_sin = table[torch.randint(100, (tokens,), generator=generator)].to(DEVICE)
        self.kv_slots = torch.randperm(2 * tokens + 5, generator=generator)[:tokens].to(DEVICE)
        self.cache = torch.full((2 * tokens + 5, lora + turned), NAN, device=DEVICE).to(
            kept or dtype
        )
        self.absorbed = torch.full((decode, heads, lora + turned), NAN, device=DEVICE, dtype=dtype)
        self.own = torch.full((tokens - decode, lora + turned), NAN, device=DEVICE, dtype=dtype)
        both = torch.randn(heads, nope + 5, lora, generator=generator).to(DEVICE, dtype)
        self.w_uk, self.w_uv = (
            both[:, :nope] * nope**-0.5,
            (both[:, nope:] * lora**-0.5).transpose(1, 2),
        )

    def run(self, prologue: object, interleaved: bool, **more: object) -> list[Tensor]:
        made = [x.clone() for x in (self.query, self.cache, self.absorbed, self.own)]
        query = made[0]
        prologue(
            query,
            self.compressed,
            self.weight,
            1e-6,
            self.cos_sin,
            interleaved,  # type: ignore[operator]
            made[1],
            self.kv_slots,
            made[2],
            made[3],
            self.w_uk,
            **more,
        )
        return [x.float().cpu() for x in made]


SIZES = [
    (3, 2, 3, 8, 16, 4),
    (2, 0, 1, 4, 24, 6),
    (2, 2, 17, 8, 16, 8),
    (1, 1, 5, 128, 512, 64),
    (0, 0, 2, 8, 16, 4),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("few", [0, head_gemms.FEW_TOKENS_MAX])
def test_prologue_writes_the_references_values(
    sizes: tuple[int, ...], interleaved: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W_UK's GEMM is within the kernel or after it. Memory that neither writes stays NaN: KV slots
    of other rows.
    """
    monkeypatch.setattr(head_gemms, "FEW_TOKENS_MAX", few)
    for seed in (0, 1):
        case = Case(*sizes, seed=seed)
        for got, expected in zip(
            case.run(mla_prologue.prologue, interleaved),
            case.run(mla.prologue, interleaved),
            strict=True,
        ):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("sizes", SIZES)
def test_products_by_heads(sizes: tuple[int, ...]) -> None:
    case = Case(*sizes, seed=4)
    tokens, decode, heads, nope, lora, turned = sizes
    for few in (0, head_gemms.FEW_PAIRS_MAX):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head_gemms, "FEW_PAIRS_MAX", few)
            made = [case.absorbed.clone(), case.absorbed.clone()]
            out = [case.own.new_full((tokens, heads, 5), NAN) for _ in range(2)]
            for where, kernels in enumerate((mla_prologue, mla)):
                kernels.absorb(case.query[:decode, :, :nope], case.w_uk, made[where])
                latent = torch.randn(
                    tokens, heads, lora, generator=torch.Generator().manual_seed(1)
                ).to(DEVICE)
                kernels.project(latent, case.w_uv, out[where])
        torch.testing.assert_close(made[0], made[1], rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(out[0], out[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens,decode,heads", [(3, 2, 3), (2, 0, 2), (1, 1, 1)])
def test_stored_blocks_within(tokens: int, decode: int, heads: int) -> None:
    for seed in (0, 1):
        case = Case(tokens, decode, heads, 128, 256, 8, seed=seed)
        blocks, _ = stored(heads, 128, 128, 256, seed)
        for got, expected in zip(
            case.run(mla_prologue.prologue, True, stored=blocks),
            case.run(mla.prologue, True, stored=blocks),
            strict=True,
        ):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens,decode,heads", [(1, 1, 16), (37, 9, 128), (80, 64, 128), (200, 130, 16)]
)
def test_stored_blocks_on_a_gpu(tokens: int, decode: int, heads: int) -> None:
    """In bf16; a step with too many tokens for the kernel uses the 16-bit weights, with the same
    result.
    """
    for seed in (0, 1):
        case = Case(tokens, decode, heads, 128, 512, 64, seed=seed, dtype=torch.bfloat16)
        blocks, values = stored(heads, 128, 128, 512, seed)
        case.w_uk = dequantize_weight(*blocks, torch.bfloat16)
        for got, expected in zip(
            case.run(mla_prologue.prologue, True, stored=blocks),
            case.run(mla.prologue, True),
            strict=True,
        ):
            torch.testing.assert_close(got, expected, rtol=2**-6, atol=4e-2, equal_nan=True)
        if decode <= 64:
            latent = torch.randn(decode, heads, 512, device=DEVICE).bfloat16()
            out = latent.new_full((decode, heads, 128), NAN)
            mla_prologue.project(latent, latent, out, stored=values)
            want = torch.einsum(
                "thk,hkn->thn", latent.double(), dequantize_weight(*values, torch.float64)
            )
            assert (out.double() - want).norm() <= 1e-2 * want.norm()


def test_store_and_gather() -> None:
    case = Case(5, 0, 1, 4, 24, 6, seed=3)
    latent, turned = case.compressed[:, :24], case.compressed[:, 24:]
    one, other = case.cache.clone(), case.cache.clone()
    mla_prologue.store(latent, turned, one, case.kv_slots)
    mla.store(latent, turned, other, case.kv_slots)
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(one[case.kv_slots], case.compressed)
    order = case.kv_slots.flip(0).int()
    got = mla_prologue.gather(one, order, torch.float16)
    assert torch.equal(got, mla.gather(one, order, torch.float16)) and got.shape == (5, 30)
    assert mla_prologue.gather(one, order[:0], torch.float32).shape == (0, 30)


def test_fp8_reference_saturates() -> None:
    cache = torch.zeros(3, 4).to(torch.float8_e4m3fn)
    mla.store(
        torch.tensor([[1000.0, -1000.0]]), torch.tensor([[0.5, 448.0]]), cache, torch.tensor([1])
    )
    assert cache.float().tolist() == [[0] * 4, [448.0, -448.0, 0.5, 448.0], [0] * 4]


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 16, 128, 512, 64), (37, 9, 128, 128, 512, 64), (300, 0, 16, 128, 512, 64)]
)
def test_on_a_gpu(sizes: tuple[int, ...], kept: torch.dtype) -> None:
    for seed in (0, 1):
        case = Case(*sizes, seed=seed, dtype=torch.bfloat16, kept=kept)
        case.compressed[:, -3:] *= 1000  # beyond FP8's range
        for got, expected in zip(
            case.run(mla_prologue.prologue, True), case.run(mla.prologue, True), strict=True
        ):
            assert torch.equal(got.isnan(), expected.isnan())
            torch.testing.assert_close(
                got,
                expected,
                rtol=2**-6 if kept is torch.bfloat16 else 2**-3,
                atol=2e-2,
                equal_nan=True,
            )


SHAPES = [(1, 3, 64), (5, 2, 192), (0, 4, 64), (33, 3, 64)]


def test_queries_in_e4m3() -> None:
    """Every line of every query is written, and saturated. NOTE: the numbers are exact in E4M3,
    because the interpreter rounds others wrongly.
    """
    for shape in SHAPES:
        held = mla.in_e4m3(
            torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).mul_(100.0)
        )
        query = held.float()
        query = torch.where(query.abs() > 300.0, query * 100.0, query)
        got = mla_prologue.in_e4m3(query.to(DEVICE))
        assert got.dtype == torch.float8_e4m3fn and got.shape == held.shape
        assert torch.equal(got.float().cpu(), query.clamp(-448.0, 448.0))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (128, 128, 576)])
def test_queries_in_e4m3_on_a_gpu(shape: tuple[int, ...]) -> None:
    """Values are rounded to nearest, and NaN stays."""
    query = (
        torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
        .mul_(100.0)
        .to(torch.bfloat16)
    )
    if query.numel():
        query.view(-1)[:4] = torch.tensor([1e5, -1e5, NAN, 2.0**-9])
    got, want = mla_prologue.in_e4m3(query.to(DEVICE)), mla.in_e4m3(query)
    torch.testing.assert_close(got.float().cpu(), want.float(), rtol=0, atol=0, equal_nan=True)
