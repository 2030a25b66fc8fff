"""Weights of the absorbed GEMMs: the values that the option allows, and the weights that the table
chooses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.core.plugin.component import CheckContext, Chosen
from glowplug.core.plugin.decided import Decided
from glowplug.plugins.attention.mla.triton import TritonMlaOptions
from glowplug.plugins.attention.shared.absorbed import (
    STORED_TOKENS_MAX,
    check_absorbed,
    stored_is_faster,
)
from glowplug.plugins.quantization.block_fp8.plugin import (
    BlockFp8Options,
    register_quantization_schemes,
)
from glowplug.plugins.quantization.none import (
    NoQuantizationOptions,
    register_quantization_schemes as plain,
)


def context(absorbed: str, quantization: Any, offers: Any, device: str = "cuda") -> CheckContext:
    chosen = {"quantization": (Chosen(quantization.use, quantization, offers),)}
    nothing: Any = SimpleNamespace()
    return CheckContext(
        TritonMlaOptions(absorbed=absorbed), nothing, nothing, chosen, Decided(device=device)
    )


def test_quantised_weights_without_blocks_are_refused() -> None:
    fp8, none = register_quantization_schemes()[0].offers, plain()[0].offers
    assert not list(check_absorbed(context("fp8", BlockFp8Options(), fp8)))
    assert not list(check_absorbed(context("auto", NoQuantizationOptions(), none)))
    for found in (
        check_absorbed(context("fp8", NoQuantizationOptions(), none)),
        check_absorbed(context("fp8", BlockFp8Options(activations="none"), fp8)),
        check_absorbed(context("fp8", BlockFp8Options(), fp8, device="cpu")),
    ):
        (refusal,) = found
        assert refusal.field == "attention.absorbed" and "block_fp8" in refusal.fix


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_the_table_chooses_the_weights(heads: int) -> None:
    for tokens in (0, 1, STORED_TOKENS_MAX, STORED_TOKENS_MAX + 1, 4096):
        assert stored_is_faster("bf16", heads, tokens) == (False, False)
        assert stored_is_faster("fp8", heads, tokens) == (
            (True, True) if 0 < tokens <= STORED_TOKENS_MAX else (False, False)
        )
        if not 0 < tokens <= STORED_TOKENS_MAX:
            assert stored_is_faster("auto", heads, tokens) == (False, False)
    assert stored_is_faster("auto", 16, 8) == (False, False)
    assert stored_is_faster("auto", 128, 8)[0]
