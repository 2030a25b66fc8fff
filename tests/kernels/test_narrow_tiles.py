"""Tiles of routed experts with narrow weights: a table's nearest line, else each kernel's own
rule.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from glowplug.kernels.gemm import int4_awq as awq_gemm, int8 as int8_gemm
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.moe.narrow import (
    int4_awq as moe_gemm_awq,
    int8 as moe_gemm_int8,
    tiles as narrow_tiles,
)
from tests.support.tables import forget

KERNELS = [
    (int8_gemm.DTYPE, moe_gemm_int8.int8_experts_rule),
    (awq_gemm.DTYPE, moe_gemm_awq.int4_experts_rule),
]
EXPERTS, INTER, HIDDEN = 8, 64, 128


@pytest.mark.parametrize(("dtype", "rule"), KERNELS)
def test_a_table_comes_before_the_kernels_rule(
    monkeypatch: pytest.MonkeyPatch, own_tables: Path, dtype: str, rule: narrow_tiles.ExpertsRule
) -> None:
    def chosen(tokens: int) -> object:
        return narrow_tiles.narrow_experts_config(dtype, rule, tokens, 2, EXPERTS, INTER, HIDDEN)

    monkeypatch.setattr(tuned, "device_name", lambda: "A_card")
    for tokens in (1, 16, 17, 64, 4096):
        assert chosen(tokens) == rule(tokens, 2, EXPERTS)
    measured = {8: {"dense": 1, "block_m": 16}, 64: {"dense": 0, "block_m": 32}}
    name = tuned.file_name(f"E={EXPERTS},N={INTER},H={HIDDEN}", dtype)
    (own_tables / name).write_text(
        json.dumps({rows: {"up": one, "down": one} for rows, one in measured.items()})
    )
    forget()
    for tokens, rows in (
        (1, 8),
        (16, 8),
        (17, 64),
        (20, 64),
        (128, 64),
    ):  # 17 tokens are too many for a tile of 16
        assert chosen(tokens) == {"up": measured[rows], "down": measured[rows]}, tokens
    assert chosen(129) == rule(129, 2, EXPERTS)


def test_kernels_do_not_share_a_choice() -> None:
    each = [
        narrow_tiles.narrow_experts_config(dtype, rule, 4, 2, EXPERTS, INTER, HIDDEN)
        for dtype, rule in KERNELS
    ]
    assert each == [rule(4, 2, EXPERTS) for _, rule in KERNELS] and each[0] != each[1]
    most = narrow_tiles.DENSE_TOKENS_MAX
    for _, rule in KERNELS:
        assert [rule(tokens, 2, EXPERTS)["up"]["dense"] for tokens in (most, most + 1)] == [1, 0]
