"""Which weights the absorbed products of latent attention read: 16 bits, or E4M3 blocks as the
checkpoint has them.

Stored blocks are what a block FP8 checkpoint says, so that reading them changes nothing but bytes;
they are used where that was measured to be faster. Products of E4M3 activations, too, would round
those, and gain nothing for few tokens.
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

MOST = 64  #: decoding tokens that a program of the kernels for stored blocks holds
#: heads of a rank -> tokens of a step for which stored blocks were faster on an H200, for W_UK and
#: for W_UV; what was measured lies in ``docs/benchmarks/fp8-bmm-h200.json``; up to 8 W_UV joins
#: parts of keys, in 16 bits
FASTER: dict[int, tuple[range, range]] = {
    16: (range(0), range(0)),
    128: (range(1, 65), range(9, 33)),
}


class AbsorbedOptions(AttentionOptions):
    """Options of backends whose absorbed products can read stored blocks."""

    absorbed: Literal["auto", "bf16", "fp8"] = Field(
        "auto",
        description="weights of the absorbed products (W_UK, W_UV) in decode steps of few tokens: as the block "
        "FP8 checkpoint stores them, or 16 bits; auto: stored ones where they were measured faster",
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        found = super().without_effect(context)
        return (
            found
            if keeps_blocks(context)
            else {**found, "absorbed": "no weights in block FP8 are kept"}
        )


def keeps_blocks(context: CheckContext) -> bool:
    """Return whether the quantization keeps weights in blocks on this device."""
    return any(
        isinstance(one.offers, QuantizationOffers)
        and isinstance(one.options, QuantizationOptions)
        and one.offers.block_shape is not None
        and not one.options.dequantizes(context.values["device"], one.offers)
        for one in context.chosen.get("quantization", ())
    )


def stored_is_faster(option: str, heads: int, tokens: int) -> tuple[bool, bool]:
    """Is W_UK's product, and W_UV's, to be made of stored blocks where there are any?"""
    if option == "bf16" or not 0 < tokens <= MOST:
        return False, False
    if option == "fp8":
        return True, True
    uk, uv = FASTER[min(FASTER, key=lambda measured: abs(math.log2(measured / heads)))]
    return tokens in uk, tokens in uv


def check_absorbed(context: CheckContext) -> Iterator[Refusal]:
    """Stored blocks can only be asked for where the quantization keeps some."""
    if getattr(context.options, "absorbed", "auto") != "fp8":
        return
    chosen = context.chosen.get("quantization", ())
    if chosen and not keeps_blocks(context):
        yield Refusal(
            context.options.use,
            "attention.absorbed",
            f"no weights in block FP8 are kept: quantization is {chosen[0].name}",
            'attention.absorbed = "auto", or quantization.use = "block_fp8"',
        )
