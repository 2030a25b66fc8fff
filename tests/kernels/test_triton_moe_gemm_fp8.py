"""Routed experts in FP8 against dequantised float32 results; ids elsewhere, uneven loads, ragged
depth.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.kernels.elementwise.activation_reference import silu_and_mul  # noqa: E402
from glowplug.kernels.formats import fp8, fp8_triton as fp8_quant  # noqa: E402
from glowplug.kernels.launch import tuned_tables as tuned  # noqa: E402
from glowplug.kernels.moe.fp8 import (  # noqa: E402
    experts as fp8_experts,
    gemm as moe_gemm_fp8,
    tiles as moe_fp8_tiles,
)
from glowplug.kernels.moe.fp8.pair_tiles import tiles_of  # noqa: E402
from tests.support.slow_cases import some_slow_rows  # noqa: E402

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
#: inner activations beside a rounding boundary may round either way; the interpreter casts some of
#: them wrongly
TOLERANCE = 1.5e-2 if DEVICE == "cuda" else 0.12
EACH = {"BLOCK_N": 128, "SWAP": True, "TMA": False, "num_warps": 4, "num_stages": 3}
FUSED = {"BLOCK_M": 16, "FUSE": True, "first": EACH, "second": EACH}
APART = {
    "BLOCK_M": 16,
    "FUSE": False,
    "first": {**EACH, "SWAP": False},
    "second": {**EACH, "SWAP": False},
}
TMA = {"BLOCK_M": 16, "FUSE": True, "first": {**EACH, "TMA": True}, "second": {**EACH, "TMA": True}}
PARTS = {**TMA, "PAIRED": True, "first": {**EACH, "TMA": True, "SPLITS": 2}}
CONFIGS = {
    "fused": FUSED,
    "apart": APART,
    "tma": TMA,
    "paired": {**FUSED, "PAIRED": True},
    "parts": PARTS,
}


class Case:
    """Random experts and their inputs: x [T, hidden], ids and weights [T, K]."""

    def __init__(
        self, tokens: int, per_token: int, experts: int, hidden: int, inter: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(tokens, hidden, generator=generator).to(DEVICE, DTYPE)
        w13 = torch.randn(experts, 2 * inter, hidden, generator=generator) / hidden**0.5
        w2 = torch.randn(experts, hidden, inter, generator=generator) / inter**0.5
        self.ids = (
            torch.stack(
                [torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)]
            )
            .to(torch.int32)
            .to(DEVICE)
        )
        self.weights = torch.rand(tokens, per_token, generator=generator).to(DEVICE)
        self.w13, self.scales13 = self.stored(w13)
        self.w2, self.scales2 = self.stored(w2)

    @staticmethod
    def stored(weight: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [fp8.quantize_weight(each.to(DEVICE)) for each in weight]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])

    def wanted(self) -> Tensor:
        rounded = fp8.fake_quantize_tokens(self.x.float())
        out = torch.zeros(self.x.shape, device=DEVICE)
        for expert in range(self.w13.shape[0]):
            token, slot = (self.ids == expert).nonzero(as_tuple=True)
            w13 = fp8.dequantize_weight(self.w13[expert], self.scales13[expert], torch.float32)
            w2 = fp8.dequantize_weight(self.w2[expert], self.scales2[expert], torch.float32)
            inner = fp8.fake_quantize_tokens(silu_and_mul(rounded[token] @ w13.t()))
            out.index_add_(0, token, inner @ w2.t() * self.weights[token, slot, None])
        return out

    def quantized(self) -> tuple[Tensor, Tensor]:
        if DEVICE == "cuda":
            return fp8_quant.quantize(self.x)
        values, scales = fp8.quantize_tokens(self.x)
        return values, scales.t().contiguous().t()

    def found(self, config: dict[str, Any]) -> Tensor:
        return fp8_experts.experts(
            *self.quantized(),
            self.w13,
            self.scales13,
            self.w2,
            self.scales2,
            self.ids,
            self.weights,
            DTYPE,
            config,
        )


def close(found: Tensor, wanted: Tensor) -> None:
    assert torch.isfinite(found).all()
    assert (found.float() - wanted).norm() <= TOLERANCE * wanted.norm()


@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("hidden", [256, 200])
def test_one_product(swap: bool, hidden: int) -> None:
    case = Case(5, 2, 4, hidden, 192, seed=hidden)
    x, scales = case.quantized()
    tiles = tiles_of(case.ids, 4, FUSED)
    found = moe_gemm_fp8.product(
        x,
        scales,
        case.w13,
        case.scales13,
        tiles,
        16,
        10,
        2,
        DTYPE,
        {**EACH, "SWAP": swap, "BLOCK_N": 64},
        case.weights,
    )
    for pair, expert in enumerate(case.ids.flatten().tolist()):
        token = slice(pair // 2, pair // 2 + 1)
        wanted = fp8.block_scaled_mm(
            x[token], scales[token], case.w13[expert], case.scales13[expert]
        )
        wanted = wanted[0] * case.weights.flatten()[pair]
        assert (found[pair].float() - wanted).norm() <= (
            5e-3 if DEVICE == "cuda" else 1e-5
        ) * wanted.norm()


@pytest.mark.parametrize("config", list(CONFIGS))
@pytest.mark.parametrize("tokens, hidden, inter", [(1, 256, 128), (5, 128, 256), (2, 200, 128)])
def test_experts(config: str, tokens: int, hidden: int, inter: int) -> None:
    case = Case(tokens, 2, 4, hidden, inter, seed=tokens)
    close(case.found(CONFIGS[config]), case.wanted())


#: (configuration, tokens, hidden, inter)
ORDERED = [
    (name, *sizes)
    for sizes in ((2, 256, 256), (7, 200, 128))
    for name in CONFIGS
    if name != "parts"
]
SLOW_ORDERED = [(name, 7, 200, 128) for name in ("paired", "apart")]  #: 9 to 11 s each
SLOW_ORDERED += [(name, 2, 256, 256) for name in ("fused", "tma")]


@pytest.mark.parametrize(
    ("config", "tokens", "hidden", "inter"), some_slow_rows(ORDERED, SLOW_ORDERED)
)
def test_the_order_of_programs_changes_no_bit(
    config: str, tokens: int, hidden: int, inter: int
) -> None:
    case = Case(tokens, 2, 5, hidden, inter, seed=tokens)
    case.ids[0, 1] = -1
    known = CONFIGS[config]
    wanted = case.found(known)
    close(wanted, case.wanted())
    for first, second in (
        ("columns", "columns"),
        ("tiles", "columns"),
        ("filled", "filled"),
        ("filled", "columns"),
    ):
        for each in (1, 2):
            found = case.found(
                {
                    **known,
                    "first": {**known["first"], "ORDER": first, "ROUND": each},
                    "second": {**known["second"], "ORDER": second, "ROUND": each},
                }
            )
            assert torch.equal(found, wanted)


def test_nothing_to_do_in_any_order() -> None:
    case = Case(3, 2, 4, 128, 128, seed=1)
    case.ids.fill_(-1)
    for order in ("tiles", "columns", "filled"):
        each = {**EACH, "ORDER": order}
        assert not case.found({**FUSED, "first": each, "second": each}).any()


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [
        (1, 16, ()),
        (8, 16, ()),
        (20, 16, ()),
        (32, 16, ("second",)),
        (191, 16, ("second",)),
        (192, 16, ("second",)),
        (383, 16, ("second",)),
        (384, 32, ("second",)),
        (639, 32, ("second",)),
        (640, 32, ("second",)),
        (895, 32, ("second",)),
        (1023, 32, ("second",)),
    ],
)
def test_the_table_of_v3(
    tokens: int, rows: int, columns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters are the rows of a tile and the GEMMs with columns side by side; some gate and
    up GEMMs read two groups of the depth at a time.
    """
    monkeypatch.setattr(tuned, "device_name", lambda: "NVIDIA_H200")
    monkeypatch.setattr(tuned, "triton_version", lambda: "3.6")
    found = moe_fp8_tiles.fp8_experts_config.__wrapped__(tokens, 9, 257, 2048, 7168, False)
    assert found["BLOCK_M"] == rows
    assert (
        tuple(part for part in ("first", "second") if found[part].get("ORDER") == "columns")
        == columns
    )
    assert (found["first"].get("ORDER"), found["first"].get("ROUND", 1)) == (
        ("filled", 2) if 8 <= tokens < 640 else (found["first"].get("ORDER"), 1)
    )
    assert found["second"].get("ROUND", 1) == 1


@pytest.mark.parametrize(
    ("tokens", "rows"), [(895, 32), (896, 192), (1024, 192), (2048, 192), (2049, 192)]
)
def test_the_table_of_v3_with_the_kernel_for_hopper(
    tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "device_name", lambda: "NVIDIA_H200")
    monkeypatch.setattr(tuned, "triton_version", lambda: "3.6")
    found = moe_fp8_tiles.fp8_experts_config.__wrapped__(tokens, 9, 257, 2048, 7168, True)
    assert found["BLOCK_M"] == rows and moe_fp8_tiles.on_hopper(found) == (rows == 192)
    assert (
        moe_fp8_tiles.fp8_experts_config.__wrapped__(
            tokens, 9, 257, 2048, 7168, True, ("NVIDIA H200", "3.6.0")
        )
        == found
    )


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 16), (34, 16), (35, 32), (136, 32), (137, 192), (5000, 192)]
)
def test_the_rule_on_hopper_by_load(tokens: int, rows: int) -> None:
    """There are 17 experts, 5 a token; elsewhere many rows get Triton's tiles."""
    found = moe_fp8_tiles.fp8_experts_rule(tokens, 5, 17, True)
    assert found["BLOCK_M"] == rows and moe_fp8_tiles.on_hopper(found) == (rows == 192)
    assert moe_fp8_tiles.fp8_experts_rule(tokens, 5, 17, False)["BLOCK_M"] == min(rows, 128)


def test_experts_elsewhere_count_for_nothing() -> None:
    case = Case(6, 2, 3, 128, 128, seed=9)
    case.ids[2] = -1
    case.ids[4, 0] = -1
    for config in (FUSED, CONFIGS["paired"], PARTS):
        found = case.found(config)
        close(found, case.wanted())
        assert not found[2].any()


def poisoned(*sizes: Any, empty: Any = torch.empty, **options: Any) -> Tensor:
    """Return new memory of numbers that no kernel may use: NaN, or an index far outside."""
    made: Tensor = empty(*sizes, **options)
    if made.dtype == torch.int32:
        return made.fill_(2**30)
    if made.dtype == torch.float8_e4m3fn:
        made.view(torch.uint8).fill_(127)
        return made
    return made.fill_(torch.nan)


@pytest.mark.parametrize("config", list(CONFIGS))
@pytest.mark.parametrize("order", ["tiles", "filled"])
def test_undefined_memory_changes_no_bit(
    config: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the pairs are on other ranks, so much of the alignment is unused."""
    case = Case(4, 3, 3, 256, 128, seed=4)
    case.ids[torch.tensor([[0, 1], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]).T.unbind()] = -1
    known = CONFIGS[config]
    given = {**known, **{name: {**known[name], "ORDER": order} for name in ("first", "second")}}
    wanted = case.found(given)
    close(wanted, case.wanted())
    monkeypatch.setattr(torch, "empty", poisoned)
    assert torch.equal(case.found(given), wanted)


def test_ragged_depth() -> None:
    case = Case(3, 2, 3, 200, 128, seed=3)
    close(case.found(FUSED), case.wanted())
    close(case.found(APART), case.wanted())


@pytest.mark.gpu
@pytest.mark.parametrize("has_hopper", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 33, 200, 700])
def test_the_rule_on_a_device(tokens: int, has_hopper: bool) -> None:
    for seed in (0, 1):
        case = Case(tokens, 5, 17, 1024, 384, seed)
        rule = moe_fp8_tiles.fp8_experts_rule(tokens, 5, 17, has_hopper)
        close(case.found(dict(rule)), case.wanted())
