"""Who multiplies routed experts in block FP8 where ``quantization.experts`` leaves it open, for the
plan. No torch.

The choice itself is made where the products are: ``experts_bytes.grouped_pays`` and
``kernels/moe/fp8/tiles``.
"""

from __future__ import annotations

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext
from glowplug.kernels.launch.cards import LIBRARIES as LIBRARY_CARDS
from glowplug.kernels.moe.fp8 import tiles as moe_fp8_tiles
from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options
from glowplug.plugins.quantization.shared.expert_bytes import DEEP_GEMM, GROUP, LEAST_LOAD, by_dtype
from glowplug.plugins.quantization.shared.provider_choice import on_device

FIELD = "quantization.experts"


def remark(context: CheckContext) -> Decision | None:
    """Of a plan for CUDA devices that our kernels are made for; None where nothing is left to be
    chosen.
    """
    options = on_device(context)
    model = context.facts.model
    dtype = context.values["dtype"]
    if (
        not isinstance(options, BlockFp8Options)
        or options.experts != "auto"
        or not model.n_routed_experts
    ):
        return None
    if by_dtype("auto", DTYPE_BYTES[dtype]) != "auto":
        return _own(f"DeepGEMM makes no {dtype}")
    if model.hidden_size % GROUP:
        return _own(f"DeepGEMM wants hidden sizes in blocks of {GROUP}, not {model.hidden_size}")
    if {card.compute for card in context.facts.hardware.devices} - LIBRARY_CARDS:
        return _own("other libraries' products were not tried on this card")
    if any(context.facts.software.packages.get(name) for name in DEEP_GEMM):
        return Decision(
            FIELD,
            "by load",
            "facts",
            f"as measured on an H200, DeepGEMM in steps that give an expert "
            f"{LEAST_LOAD} rows or more on average, our own kernels in smaller ones",
        )
    return _own(
        f"DeepGEMM is not installed, warps with roles from {moe_fp8_tiles.FEW} rows an expert on; with it (pip "
        f"install {DEEP_GEMM[0]}) V3's experts took up to a fifth less time in large steps on an H200"
    )


def _own(why: str) -> Decision:
    return Decision(
        FIELD, "triton", "facts", f"our own kernels for every load: {why}", notable=True
    )
