"""The plan's remark on how ``quantization.experts = "auto"`` is resolved for block FP8. No torch.

The choice itself is made next to the kernels: ``expert_bytes.grouped_pays`` and
``kernels/moe/fp8/tiles``.
"""

from __future__ import annotations

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext
from glowplug.kernels.launch.cards import LIBRARIES as LIBRARY_CARDS
from glowplug.kernels.moe.fp8 import tiles as moe_fp8_tiles
from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options
from glowplug.plugins.quantization.shared.expert_bytes import (
    DEEP_GEMM,
    GROUP,
    GROUPED_LOAD_MIN,
    provider_for_dtype,
)
from glowplug.plugins.quantization.shared.provider_choice import narrow_options

FIELD = "quantization.experts"


def remark(context: CheckContext) -> Decision | None:
    """Return a note for the plan's table: the provider that "auto" gives the routed experts' GEMMs.

    Returns:
        The note; None if there is nothing to choose: another option value, another scheme, or no
        routed experts.
    """
    options = narrow_options(context)
    model = context.facts.model
    dtype = context.values.dtype
    if (
        not isinstance(options, BlockFp8Options)
        or options.experts != "auto"
        or not model.n_routed_experts
    ):
        return None
    if provider_for_dtype("auto", DTYPE_BYTES[dtype]) != "auto":
        return _own_kernels(f"DeepGEMM has no {dtype} results")
    if model.hidden_size % GROUP:
        return _own_kernels(
            f"DeepGEMM needs a hidden size that is a multiple of {GROUP}, not {model.hidden_size}"
        )
    if {card.compute for card in context.facts.hardware.devices} - LIBRARY_CARDS:
        return _own_kernels("8-bit GEMMs of other libraries were not tried on this GPU")
    if any(context.facts.software.packages.get(name) for name in DEEP_GEMM):
        return Decision(
            FIELD,
            "by load",
            "facts",
            f"DeepGEMM in steps with {GROUPED_LOAD_MIN} rows or more per expert on average, our "
            "own kernels in smaller steps (measured on an H200)",
        )
    few_rows = moe_fp8_tiles.SMALL_TILE_ROWS_MAX
    return _own_kernels(
        f"DeepGEMM is not installed; our warp-specialised kernel runs above {few_rows} "
        f"rows per expert. Installing it (pip install {DEEP_GEMM[0]}) made V3's experts up to 20% "
        "faster in large steps on an H200"
    )


def _own_kernels(reason: str) -> Decision:
    """Return the note that our own kernels run at every load, for the given ``reason``."""
    return Decision(
        FIELD, "triton", "facts", f"our own kernels at every load: {reason}", notable=True
    )
