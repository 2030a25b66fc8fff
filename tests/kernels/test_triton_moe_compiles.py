"""V2-Lite's experts of 129 to 512 tokens with the tiles of an H200's table: the token counts of
each row, and that its kernels compile for Hopper on a machine without one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import uninterpreted

pytest.importorskip("triton")

from glowplug.core.plugin.byte_costs import ExpertsStep
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.moe import tiles as moe_tiles, tuning_candidates
from glowplug.kernels.moe.align import max_blocks
from glowplug.kernels.moe.tiles import ExpertsProblem
from glowplug.plugins.quantization.shared.expert_bytes import dense_experts
from tests.support.tables import forget

PROBLEM = ExpertsProblem(66, 8, 2048, 1408, "bfloat16")
SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.moe import gemm as moe_gemm
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.moe.experts import EARLY_TOKENS_MAX
from glowplug.kernels.moe.tiles import ExpertsProblem, dense_experts_config

tuned.device_name, tuned.triton_version = (lambda: "NVIDIA_H200"), (lambda: "3.6")
problem = ExpertsProblem(66, 8, 2048, 1408, "bfloat16")
for tokens in (160, 192, 256, 384, 512):
    for product, early in (("up", True), ("up", False), ("down", False)):
        if early and tokens > EARLY_TOKENS_MAX:
            continue
        config, up = dense_experts_config(problem, tokens)[product], product == "up"
        rows, columns, depth = config["block_m"], config["block_n"], config["block_k"]
        tma, x_tma = bool(config["tma"]), bool(config["tma"]) and not up
        wide = dict(zip(("SHARED_M", "SHARED_N", "SHARED_K"),
                        moe_gemm.fused_shared_tile_sizes(tokens, up, config)))
        constants = dict(UP=up, SORTED=True, TOPK=8, WIDTH=8, TMA=tma, X_TMA=x_tma,
                         SWAP=bool(config["swap"]),
                         EVEN_K=True, MASK=rows <= moe_gemm.MASKED_TILE_ROWS_MAX and not x_tma,
                         BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=depth, FUSED_SHARED=2, EARLY=early,
                         DEPENDENT=True,
                         **wide)
        kinds = dict(x=f"tensordesc<bf16[{rows},{depth}]>" if x_tma else "*bf16", x_stored="*bf16",
                     w=f"tensordesc<bf16[{columns},{depth}]>" if tma else "*bf16", stored="*bf16",
                     out="*bf16",
                     weights="*bf16" if up else "*fp32",
                     **dict.fromkeys(("ids", "sorted_pairs", "expert_of_block", "ready"), "*i32"))
        build(moe_gemm._grouped, kinds, constants, ("columns", "depth"), num_warps=config["warps"],
              num_stages=config["stages"])
"""


@pytest.mark.slow
def test_they_compile_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == ["_grouped"] * 14


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables of an H200, with the version of Triton that they were measured with."""
    monkeypatch.setattr(tuned, "device_name", lambda: "NVIDIA_H200")
    monkeypatch.setattr(tuned, "triton_version", lambda: "3.6")
    forget()
    yield
    forget()


def test_rows_of_the_table_serve_their_token_counts(an_h200: None) -> None:
    table = tuned.table(PROBLEM.table_name)
    assert table is not None
    for row, (first, last) in {
        160: (144, 175),
        192: (176, 223),
        256: (224, 319),
        384: (320, 447),
    }.items():
        for tokens in (first, row, last):
            config = moe_tiles.dense_experts_config(PROBLEM, tokens)
            assert config is table[row]
            assert {product["way"] for product in config.values()} == {"sorted"}, (
                "tiles of any number of tokens"
            )
            assert moe_tiles.fused_shared_has_own_tiles(config["up"], tokens), (
                "so everybody's experts may begin early"
            )
    assert (
        moe_tiles.dense_experts_config(PROBLEM, 143) is table[128]
        and moe_tiles.dense_experts_config(PROBLEM, 448) is table[512]
    )
    for tokens, config in table.items():
        tiles = {product: tile for product, tile in config.items() if tile["way"] == "sorted"}
        assert len(tiles) in (0, 2) and len({tile["block_m"] for tile in tiles.values()}) <= 1, (
            "one alignment for both"
        )
        assert all(
            tuning_candidates._fits(product, tile, PROBLEM, tokens)
            for product, tile in tiles.items()
        )


def step(tokens: int, card: str = "NVIDIA H200", triton: str = "3.6.0") -> ExpertsStep:
    return ExpertsStep(
        tokens, 8, 66, 2, 2048, 1408, 2, True, None, {"triton": triton}, "bfloat16", card
    )


def held(tokens: int) -> int:
    """Return the bytes of the rows between the GEMMs, padding rows of tiles included, and of the
    rows after the second; the latter have one of the shared expert where that is computed
    separately.
    """
    up = moe_tiles.dense_experts_config(PROBLEM, tokens)["up"]
    shared_dense, wide = up["way"] == "hopper", moe_tiles.fused_shared_has_own_tiles(up, tokens)
    pairs, experts = (tokens * 6, 64) if shared_dense or wide else (tokens * 8, 66)
    places = max_blocks(pairs, experts, up["block_m"]) * up["block_m"]
    between, behind = places + (2 * tokens if wide else 0), 7 if shared_dense else 8
    return int(between * PROBLEM.inter * 2 + places * 4 + tokens * behind * PROBLEM.hidden * 2)


@pytest.mark.parametrize(
    "tokens",
    [32, 128, 160, 256, 319, 320, 447, 512, 639, 640, 767, 895, 896, 1279, 1536, 2303, 3072, 8192],
)
def test_the_budget_equals_the_held_rows(tokens: int, an_h200: None) -> None:
    assert dense_experts(step(tokens)).peak == held(tokens)


@pytest.mark.parametrize("tokens", [1280, 1300, 1792])
def test_the_budget_covers_steps_of_fewer_tokens(tokens: int, an_h200: None) -> None:
    """Rows of the table that come before a leaner one serve the largest of these counts."""
    most = max((held(fewer), fewer) for fewer in range(129, tokens + 1))
    assert most[1] < tokens and (dense_experts(step(tokens)).peak, most[1]) == most


@pytest.mark.parametrize(
    ("card", "triton"), [("NVIDIA H100 80GB HBM3", "3.6.0"), ("NVIDIA H200", "3.7.1"), ("", "")]
)
def test_without_a_table_the_budget_has_the_rule(
    card: str, triton: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_tiles, "dense_experts_config", moe_tiles.dense_experts_rule)
    for tokens in (512, 1536, 8192):
        assert dense_experts(step(tokens, card, triton)).peak == held(tokens)
