"""Block FP8: E4M3 weights in 128x128 blocks, activations quantised a token and 128 channels at a
time (DeepSeek-V3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.options import QuantizationOptions
from glowplug.plugins.quantization.shared.expert_bytes import (
    CAST,
    DEEP_GEMM,
    fp8_experts,
    fp8_turns,
)
from glowplug.plugins.quantization.shared.triton_needed import check_libraries, check_triton

METHOD = "fp8"  #: the checkpoint's ``quant_method``
#: packages of the libraries that ``gemm`` and ``experts`` name
LIBRARIES = {
    "triton": ("triton",),
    "deep_gemm": DEEP_GEMM,
    "cutlass": ("sglang-kernel",),
    "flashinfer": ("flashinfer-python",),
}
MASKED = {"deep_gemm_masked": DEEP_GEMM}  #: a name of ``experts`` alone
#: who makes results in 16 bits alone
HALVES = frozenset({"cutlass", "cublas", "deep_gemm", "deep_gemm_masked", "flashinfer"})


class BlockFp8Options(QuantizationOptions):
    use: Literal["block_fp8"] = "block_fp8"
    activations: Literal["auto", "dynamic", "none"] = Field(
        "auto",
        description="quantise activations to E4M3 before each product (dynamic) or leave them in the compute "
        "dtype (none); auto is dynamic where products run in FP8, none where weights are "
        "dequantised, because rounding there costs time and accuracy and saves nothing",
    )
    gemm: Literal["auto", "triton", "deep_gemm", "cutlass", "cublas", "flashinfer"] = Field(
        "auto",
        description="who multiplies linear layers in FP8 on a CUDA device; auto: for each shape whoever was "
        "measured fastest among those installed",
        json_schema_extra={"provider": "linear"},
    )
    experts: Literal["auto", "triton", "deep_gemm", "deep_gemm_masked", "cutlass"] = Field(
        "auto",
        description="who multiplies routed experts in FP8 on a CUDA device; auto: DeepGEMM where it is "
        "installed, experts get many rows each and the dtype has 16 bits, our own kernels "
        "otherwise (the plan says which); deep_gemm_masked: its masked layout for steps of up "
        "to 512 tokens, auto for larger ones; cutlass: sgl_kernel's grouped product",
        json_schema_extra={"provider": "experts"},
    )

    def dequantizes(self, device: str, offers: QuantizationOffers) -> bool:
        return self.activations == "none" or super().dequantizes(device, offers)


def check_block_fp8(context: CheckContext) -> Iterator[Refusal]:
    """Native checkpoints must hold E4M3 in blocks and ask for dynamic activation scales; devices
    must multiply it.
    """
    if context.options.activations != "none":
        yield from check_triton(context, "block_fp8", 'activations = "none"')
        yield from check_libraries(context, "block_fp8")
        yield from _results(context)
    model = context.facts.model
    if model.quant_method != METHOD:
        return
    stated = model.config.get("quantization_config") or {}
    by = "block_fp8"
    if model.quant_block is None:
        yield Refusal(
            by,
            "quantization.use",
            "the checkpoint is FP8 with one scale a tensor (no weight_block_size); "
            "block_fp8 reads blocks",
            "a checkpoint with weight_block_size [128, 128]",
        )
    if stated.get("fmt", "e4m3") not in {"e4m3", "float8_e4m3fn"}:
        yield Refusal(
            by,
            "quantization.use",
            f"the checkpoint stores {stated['fmt']}; block_fp8 reads e4m3",
            "a checkpoint in e4m3",
        )
    if (
        stated.get("activation_scheme", "dynamic") != "dynamic"
        and context.options.activations == "auto"
    ):
        yield Refusal(
            by,
            "quantization.activations",
            "the checkpoint asks for activations of scheme "
            f"{stated['activation_scheme']!r}; block_fp8 knows dynamic scales",
            'quantization.activations = "dynamic" (or "none")',
        )


def _results(context: CheckContext) -> Iterator[Refusal]:
    """A library that was named must make results in the compute dtype."""
    dtype = context.values["dtype"]
    if context.values["device"] != "cuda" or dtype != "float32":
        return
    for name in context.options.provider_fields():
        value = getattr(context.options, name)
        if value in HALVES:
            yield Refusal(
                "block_fp8",
                f"quantization.{name}",
                f"{value} makes results in 16 bits alone, the dtype is {dtype}",
                f'quantization.{name} = "auto" (or dtype = "bfloat16")',
            )


@hookimpl
def register_quantization_schemes() -> list[Component]:
    return [
        Component(
            name="block_fp8",
            options=BlockFp8Options,
            check=check_block_fp8,
            factory="glowplug.plugins.quantization.block_fp8.cpu:block_fp8",
            offers=QuantizationOffers(
                reads=frozenset({METHOD}),
                online=True,
                block_shape=(128, 128),
                dequantizes=frozenset({"cpu"}),
                cast_bytes=CAST,
                rides=True,
                experts_work=fp8_experts,
                turns=fp8_turns,
            ),
            uses={**LIBRARIES, **MASKED},
            summary="E4M3 weights in 128x128 blocks, native or quantised while loading",
        )
    ]
