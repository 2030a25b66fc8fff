"""The choice of weights for the absorbed GEMMs of latent attention (W_UK and W_UV).

These GEMMs can read 16-bit weights, or the E4M3 blocks as the checkpoint stores them. Reading the
stored blocks changes only the bytes read, not the values, because a block FP8 checkpoint defines
its weights by these blocks. The stored blocks are read where this was measured to be faster. GEMMs
with E4M3 activations would also round the activations, and gain nothing for few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.options import AttentionOptions, QuantizationOptions

STORED_TOKENS_MAX = 64  #: most decode tokens that one program of the stored-block kernels holds
#: heads of a rank -> decode tokens of a step for which stored blocks were faster on an H200, for
#: W_UK and for W_UV (measurements: ``docs/benchmarks/fp8-bmm-h200.json``). Up to 8 tokens, W_UV's
#: kernel merges the KV splits instead, which needs 16-bit weights.
STORED_FASTER_TOKENS: dict[int, tuple[range, range]] = {
    16: (range(0), range(0)),
    128: (range(1, 65), range(9, 33)),
}


class AbsorbedOptions(AttentionOptions):
    """Options of backends whose absorbed GEMMs can read stored FP8 blocks."""

    absorbed: Literal["auto", "bf16", "fp8"] = Field(
        "auto",
        description="weights of the absorbed GEMMs (W_UK, W_UV) in decode steps of few tokens: "
        "fp8 reads the blocks of a block FP8 checkpoint as stored, bf16 reads 16-bit weights; "
        "auto: fp8 where it was measured faster",
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        found = super().without_effect(context)
        return (
            found
            if keeps_blocks(context)
            else {**found, "absorbed": "no weights in block FP8 are kept"}
        )


def keeps_blocks(context: CheckContext) -> bool:
    """Return whether the chosen quantization keeps weights as FP8 blocks on the plan's device."""
    return any(
        isinstance(one.offers, QuantizationOffers)
        and isinstance(one.options, QuantizationOptions)
        and one.offers.block_shape is not None
        and not one.options.dequantizes(context.values.device, one.offers)
        for one in context.chosen.get("quantization", ())
    )


def stored_is_faster(option: str, heads: int, tokens: int) -> tuple[bool, bool]:
    """Return whether W_UK's GEMM should read stored FP8 blocks, and whether W_UV's should.

    The answers hold for layers that keep such blocks.

    Args:
        option: Value of the option ``absorbed``: "auto", "bf16" or "fp8".
        heads: Number of heads on this rank.
        tokens: Number of decode tokens of the step.
    """
    if option == "bf16" or not 0 < tokens <= STORED_TOKENS_MAX:
        return False, False
    if option == "fp8":
        return True, True
    uk, uv = STORED_FASTER_TOKENS[
        min(STORED_FASTER_TOKENS, key=lambda measured: abs(math.log2(measured / heads)))
    ]
    return tokens in uk, tokens in uv


def check_absorbed(context: CheckContext) -> Iterator[Refusal]:
    """Refuse ``absorbed = "fp8"`` when the quantization keeps no stored FP8 blocks."""
    if getattr(context.options, "absorbed", "auto") != "fp8":
        return
    chosen = context.chosen.get("quantization", ())
    if chosen and not keeps_blocks(context):
        yield Refusal(
            context.options.use,
            "attention.absorbed",
            f"the quantization {chosen[0].name} keeps no block FP8 weights to read",
            'attention.absorbed = "auto", or quantization.use = "block_fp8"',
        )
