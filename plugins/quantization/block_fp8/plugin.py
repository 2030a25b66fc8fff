"""Block FP8 (DeepSeek-V3): E4M3 weights in 128x128 blocks.

Activations are quantised per token and group of 128 channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import TensorFact
from glowplug.core.facts.stored_formats import StoredLeaf, StoredWeight
from glowplug.core.plugin.byte_costs import NUMBER_BYTES
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.options import QuantizationOptions
from glowplug.plugins.quantization.shared.expert_bytes import (
    DEEP_GEMM,
    FP8_NUMBER_BYTES,
    MASKED_TOKENS,
    fp8_experts,
)
from glowplug.plugins.quantization.shared.triton_needed import check_libraries, check_triton

METHOD = "fp8"  #: the checkpoint's ``quant_method``
E4M3 = "float8_e4m3fn"  #: torch's name for the dtype of weights
#: value of ``gemm`` or ``experts`` -> packages it needs
LIBRARIES = {
    "triton": ("triton",),
    "deep_gemm": DEEP_GEMM,
    "cutlass": ("sglang-kernel",),
    "flashinfer": ("flashinfer-python",),
}
#: value that only ``experts`` has -> packages it needs
MASKED_LIBRARY = {"deep_gemm_masked": DEEP_GEMM}
#: providers whose results have 16 bits only
SIXTEEN_BIT_ONLY = frozenset({"cutlass", "cublas", "deep_gemm", "deep_gemm_masked", "flashinfer"})


class BlockFp8Options(QuantizationOptions):
    use: Literal["block_fp8"] = "block_fp8"
    activations: Literal["auto", "dynamic", "none"] = Field(
        "auto",
        description="quantise activations to E4M3 before each GEMM (dynamic) or keep them in the "
        "compute dtype (none); auto: dynamic where GEMMs run in FP8, none where weights are "
        "dequantised, because rounding would cost time and accuracy and save nothing",
    )
    gemm: Literal["auto", "triton", "deep_gemm", "cutlass", "cublas", "flashinfer"] = Field(
        "auto",
        description="GEMM provider for linear layers in FP8 on CUDA devices; auto: for each shape "
        "the fastest measured provider that is installed",
        json_schema_extra={"provider": "linear"},
    )
    experts: Literal["auto", "triton", "deep_gemm", "deep_gemm_masked", "cutlass"] = Field(
        "auto",
        description="GEMM provider for routed experts in FP8 on CUDA devices; auto: DeepGEMM if "
        "it is installed, each expert gets many rows and the dtype has 16 bits, otherwise our own "
        "kernels (the plan shows the choice); deep_gemm_masked: DeepGEMM's masked GEMM for steps "
        "of up to 512 tokens, auto for larger ones; cutlass: sgl_kernel's grouped GEMM",
        json_schema_extra={"provider": "experts"},
    )

    def dequantizes(self, device: str, offers: QuantizationOffers) -> bool:
        return self.activations == "none" or super().dequantizes(device, offers)


def check_block_fp8(context: CheckContext) -> Iterator[Refusal]:
    """Refuse FP8 checkpoints other than E4M3 in blocks with dynamic activation scales.

    Also refuse devices and libraries that cannot compute in block FP8.
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
            "the checkpoint is FP8 with one scale per tensor (no weight_block_size); "
            "block_fp8 reads block scales",
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
            f"the checkpoint requires the activation scheme {stated['activation_scheme']!r}; "
            "block_fp8 supports dynamic scales only",
            'quantization.activations = "dynamic" (or "none")',
        )


def _results(context: CheckContext) -> Iterator[Refusal]:
    """Refuse GEMM libraries that the options name but that cannot return the compute dtype."""
    dtype = context.values.dtype
    if context.values.device != "cuda" or dtype != "float32":
        return
    for name in context.options.provider_fields():
        value = getattr(context.options, name)
        if value in SIXTEEN_BIT_ONLY:
            yield Refusal(
                "block_fp8",
                f"quantization.{name}",
                f"{value} supports 16-bit results only, and the dtype is {dtype}",
                f'quantization.{name} = "auto" (or dtype = "bfloat16")',
            )


def fp8_peak_tokens(options: BlockFp8Options) -> tuple[int, ...]:
    """Return the token counts of steps whose experts may need more memory than larger steps.

    Steps above ``MASKED_TOKENS`` do not use the masked layout: they allocate rows only for existing
    pairs of a token and an expert.
    """
    return (MASKED_TOKENS,) if options.experts == "deep_gemm_masked" else ()


def stored_blocks(weight: StoredWeight) -> dict[str, TensorFact]:
    """Return, by name, the checkpoint tensors that store a weight.

    They are E4M3 values and a scale for each block, or the weight alone if the model has no blocks.
    """
    model, rows, columns = weight.model, weight.rows, weight.columns
    if model.quant_block is None:
        return {"weight": TensorFact(model.dtype, (rows, columns))}
    blocks = (-(-rows // model.quant_block[0]), -(-columns // model.quant_block[1]))
    return {
        "weight": TensorFact(E4M3, (rows, columns)),
        "weight_scale_inv": TensorFact("float32", blocks),
    }


@hookimpl
def register_quantization_schemes() -> list[Component]:
    return [
        Component(
            name="block_fp8",
            options=BlockFp8Options,
            check=check_block_fp8,
            factory="glowplug.plugins.quantization.block_fp8.runtime:block_fp8",
            offers=QuantizationOffers(
                reads=frozenset({METHOD}),
                stored=stored_blocks,
                leaves=(
                    StoredLeaf("weight", 1, dtype=E4M3),
                    StoredLeaf("weight_scale_inv", NUMBER_BYTES, scale=True),
                ),
                online=True,
                block_shape=(128, 128),
                dequantizes=frozenset({"cpu"}),
                cast_bytes=FP8_NUMBER_BYTES,
                fused_shared=True,
                places_experts=True,
                experts_work=fp8_experts,
                peak_tokens=fp8_peak_tokens,
                aliases=frozenset({METHOD}),
            ),
            uses={**LIBRARIES, **MASKED_LIBRARY},
            summary="E4M3 weights in 128x128 blocks, native or quantised while loading",
        )
    ]
