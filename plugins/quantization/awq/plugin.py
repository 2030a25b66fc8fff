"""AWQ (Lin et al., 2023): int4 weights with a scale and a zero for each group of inputs.

Activations have 16 bits. Checkpoints are those of AutoAWQ (version "gemm") with tensors
``qweight``, ``qzeros`` and ``scales``; see ``kernels/formats/awq.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.facts.stored_formats import StoredLeaf, StoredWeight, quantization_config
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.options import QuantizationOptions
from glowplug.plugins.quantization.shared.triton_needed import check_triton

NAME = "awq"
FIELD = "quantization.use"
WORD = "int32"  #: dtype of packed tensors
WORD_NUMBERS = 8  #: int4 numbers in a word
HALF_BYTES = 2  #: bytes of a scale or zero in our kernels' weight layout
WHOLE_ROW = -1  #: group size that means one scale per row
GROUP_MIN = 32
BLOCK = 128  #: inputs in a block of our kernels' weight layout
SUPPORTED = "a checkpoint that AutoAWQ wrote with 4 bits, zero_point true and version gemm"
DOWNLOAD_AGAIN = "download the checkpoint again"
NAMES_SHOWN = 3  #: names listed in a reason


class AwqOptions(QuantizationOptions):
    use: Literal["awq"] = "awq"
    gemm: Literal["auto", "triton", "cublas"] = Field(
        "auto",
        description="GEMM provider for linear layers on CUDA devices: triton (our own kernel, "
        "which unpacks weights on the fly) or cublas (after dequantising them); auto: for each "
        "shape and number of rows the fastest measured one",
        json_schema_extra={"provider": "linear"},
    )
    dequantize: bool = Field(
        False, description="keep weights in the compute dtype on CUDA devices too"
    )

    def dequantizes(self, device: str, offers: QuantizationOffers) -> bool:
        return self.dequantize or super().dequantizes(device, offers)

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        found = super().without_effect(context)
        device = context.values.device
        (scheme,) = context.of(QuantizationOffers)
        return (
            {**found, "dequantize": f"weights are dequantised on {device} anyway"}
            if super().dequantizes(device, scheme.offers)
            else found
        )

    def split_block(self, device: str, offers: QuantizationOffers, model: ModelFacts) -> int:
        """Return the number of channels that must stay on one rank: those of a group, at least 8.

        A word of the checkpoint packs 8 outputs.
        """
        return max(8, awq_group(model))


def awq_group(model: ModelFacts) -> int:
    """Return the number of inputs that share a scale in an AWQ checkpoint.

    The result is -1 if all inputs of a row share a scale, and 0 if the group size in config.json is
    not an integer.
    """
    stated = quantization_config(model)
    group = stated.get("group_size", stated.get("q_group_size", 128))
    return group if isinstance(group, int) and not isinstance(group, bool) else 0


def stored_words(weight: StoredWeight) -> dict[str, TensorFact]:
    """Return, by name, the checkpoint tensors that store a weight.

    They are packed weights, packed zeros and scales.
    """
    rows, columns = weight.rows, weight.columns
    group = awq_group(weight.model)
    groups = -(-columns // group) if group > 0 else 1
    words = -(-rows // WORD_NUMBERS)
    return {
        "qweight": TensorFact(WORD, (columns, words)),
        "qzeros": TensorFact(WORD, (groups, words)),
        "scales": TensorFact("float16", (groups, rows)),
    }


def check_awq(context: CheckContext) -> Iterator[Refusal]:
    """Refuse AWQ checkpoints in an unsupported format, and devices without our int4 kernels."""
    model = context.facts.model
    if not context.options.dequantize:
        yield from check_triton(context, NAME, "dequantize = true")
    if model.quant_method != NAME:
        return
    found = list(_stated(quantization_config(model), awq_group(model)))
    if not found:
        found = list(_stored(model.tensors, awq_group(model)))
    yield from (Refusal(NAME, FIELD, reason, fix) for reason, fix in found)


def _stated(stated: Mapping[str, Any], group: int) -> Iterator[tuple[str, str]]:
    """Yield a refusal's (reason, fix) for each unsupported setting of ``quantization_config``."""
    bits = stated.get("bits", stated.get("w_bit", 4))
    if bits != 4:
        yield f"the checkpoint has {bits}-bit weights; {NAME} reads 4-bit weights", SUPPORTED
    if stated.get("zero_point", True) is not True:
        yield (
            f"the checkpoint has no zeros (zero_point false); {NAME} needs a zero per group",
            SUPPORTED,
        )
    version = str(stated.get("version", "gemm")).lower()
    if version != "gemm":
        yield (
            f"the checkpoint is packed in version {version!r}; {NAME} reads version 'gemm'",
            SUPPORTED,
        )
    if group != WHOLE_ROW and (
        group < GROUP_MIN or group % GROUP_MIN or BLOCK % group and group % BLOCK
    ):
        shown = stated.get("group_size", stated.get("q_group_size"))
        yield (
            f"the checkpoint has groups of {shown}; {NAME} supports 32, 64, multiples of 128, and "
            "-1",
            "a checkpoint with group_size 128",
        )


def _stored(tensors: Mapping[str, TensorFact], group: int) -> Iterator[tuple[str, str]]:
    """Yield a refusal's (reason, fix) for each fault of the checkpoint's tensors.

    ``tensors`` is empty if their headers were not read; then no fault is found.
    """
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if tensors and not modules:
        yield (
            f"config.json has quant_method {NAME}, but no tensor is named qweight",
            DOWNLOAD_AGAIN,
        )
    for leaf in ("qzeros", "scales"):
        missing = [name for name in modules if f"{name}.{leaf}" not in tensors]
        if missing:
            yield f"{len(missing)} int4 weights have no {leaf}: {_some(missing)}", DOWNLOAD_AGAIN
    cut = [name for name in modules if group > 0 and _inputs(tensors, name) % group]
    if cut:
        yield (
            f"{cut[0]} has {_inputs(tensors, cut[0])} inputs, not a multiple of the group size "
            f"{group}" + (f" (and {len(cut) - 1} more weights)" if len(cut) > 1 else ""),
            "a checkpoint with smaller groups",
        )


def _inputs(tensors: Mapping[str, TensorFact], module: str) -> int:
    return tensors[f"{module}.qweight"].shape[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (
        f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    )


@hookimpl
def register_quantization_schemes() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=AwqOptions,
            check=check_awq,
            factory="glowplug.plugins.quantization.awq.runtime:awq",
            offers=QuantizationOffers(
                reads=frozenset({NAME}),
                stored=stored_words,
                leaves=(
                    StoredLeaf("qweight", 0.5, dtype=WORD, packed=WORD_NUMBERS),
                    StoredLeaf("qzeros", HALF_BYTES, WORD, scale=True, packed=WORD_NUMBERS),
                    StoredLeaf("scales", HALF_BYTES, scale=True),
                ),
                dequantizes=frozenset({"cpu"}),
                fused_shared=True,
                places_experts=True,
            ),
            uses={"triton": ("triton",), "cublas": ("triton",)},
            summary="int4 weights with a scale and a zero per group, as AutoAWQ writes them",
        )
    ]
