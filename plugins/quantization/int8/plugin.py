"""Int8 W8A8: weights with one scale per row, activations with one per token, both symmetric.

Checkpoints have ``quant_method`` "w8a8_int8" or compressed-tensors' "int-quantized", with
``weight`` int8 [N, K] and ``weight_scale`` [N] or [N, 1]. Unquantised checkpoints are quantised
while they load.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.facts.stored_formats import StoredLeaf, StoredWeight, quantization_config
from glowplug.core.plugin.byte_costs import NUMBER_BYTES
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.options import QuantizationOptions
from glowplug.plugins.quantization.shared.expert_bytes import int8_experts
from glowplug.plugins.quantization.shared.skipped_modules import EXPRESSION, KEYS
from glowplug.plugins.quantization.shared.triton_needed import check_libraries, check_triton

NAME = "w8a8_int8"
METHODS = frozenset({NAME, "compressed-tensors"})  #: values of ``quant_method``
FORMAT = "int-quantized"  #: compressed-tensors' name of weights stored as 8-bit integers
FIELD = "quantization.use"
#: compressed-tensors' settings of weights: key -> (required value, value if the key is absent)
WEIGHTS: Mapping[str, tuple[Any, Any]] = {
    "num_bits": (8, 8),
    "type": ("int", "int"),
    "symmetric": (True, True),
    "strategy": ("channel", "channel"),
    "dynamic": (False, False),
}
#: compressed-tensors' settings of activations, likewise
ACTIVATIONS: Mapping[str, tuple[Any, Any]] = {
    "num_bits": (8, 8),
    "type": ("int", "int"),
    "symmetric": (True, True),
    "strategy": ("token", "token"),
    "dynamic": (True, False),
}
SUPPORTED = (
    "a checkpoint of int8 weights with a scale per row and dynamic activation scales per token"
)
#: value of ``gemm`` -> packages it needs
LIBRARIES = {"triton": ("triton",), "cutlass": ("sglang-kernel",)}
NAMES_SHOWN = 3  #: names listed in a reason


class W8A8Int8Options(QuantizationOptions):
    use: Literal["w8a8_int8"] = "w8a8_int8"
    activations: Literal["auto", "dynamic", "none"] = Field(
        "auto",
        description="quantise activations to int8 before each GEMM (dynamic) or keep them in the "
        "compute dtype (none); auto: dynamic where GEMMs run in int8, none where weights are "
        "dequantised, because rounding would cost time and accuracy and save nothing",
    )
    gemm: Literal["auto", "triton", "cutlass"] = Field(
        "auto",
        description="GEMM provider for linear layers in int8 on CUDA devices; auto: for each "
        "shape and number of rows the fastest measured provider that is installed",
        json_schema_extra={"provider": "linear"},
    )

    def dequantizes(self, device: str, offers: QuantizationOffers) -> bool:
        return self.activations == "none" or super().dequantizes(device, offers)


def check_w8a8_int8(context: CheckContext) -> Iterator[Refusal]:
    """Refuse int8 checkpoints that are not symmetric or have static activation scales.

    Both the quantization config and the stored tensors are checked. Also refuse devices and
    libraries that cannot compute in int8.
    """
    model = context.facts.model
    if context.options.activations != "none":
        yield from check_triton(context, NAME, 'activations = "none"')
        yield from check_libraries(context, NAME)
    if model.quant_method in METHODS:
        yield from (
            Refusal(NAME, FIELD, reason, fix) for reason, fix in _stated(quantization_config(model))
        )
    yield from (Refusal(NAME, FIELD, reason, fix) for reason, fix in _stored(model))


def _stated(stated: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a refusal's (reason, fix) for each unsupported setting of ``quantization_config``."""
    kind = stated.get("format", FORMAT)
    if kind != FORMAT:
        yield f"the checkpoint's format is {kind!r}; {NAME} reads {FORMAT!r}", SUPPORTED
        return
    if stated.get("activation_scheme", "dynamic") != "dynamic":
        yield (
            f"the checkpoint requires the activation scheme {stated['activation_scheme']!r}; "
            f"{NAME} supports dynamic scales only",
            SUPPORTED,
        )
    if stated.get("kv_cache_scheme"):
        yield (
            "the checkpoint has KV cache scales, which are not supported",
            "a checkpoint without them",
        )
    groups = stated.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        yield from _group(name, group if isinstance(group, dict) else {})
    for entry in (str(entry) for key in KEYS for entry in stated.get(key) or ()):
        try:
            re.compile(entry.removeprefix(EXPRESSION) if entry.startswith(EXPRESSION) else "")
        except re.error as error:
            yield (
                f"the checkpoint's list of ignored modules has {entry!r}, which is not a regular "
                f"expression: {error}",
                SUPPORTED,
            )


def _group(name: str, group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a refusal's (reason, fix) for each unsupported setting of one of ``config_groups``.

    ``name``: key of the group in ``quantization_config["config_groups"]``.
    """
    for part, wanted in (("weights", WEIGHTS), ("input_activations", ACTIVATIONS)):
        settings = group.get(part)
        if not isinstance(settings, dict):
            yield (
                f"{name} of the checkpoint leaves {part} unquantised; {NAME} needs both in int8",
                SUPPORTED,
            )
            continue
        for key, (value, default) in wanted.items():
            found = settings.get(key, default)
            if found != value:
                yield (
                    f"{name} of the checkpoint has {part} with {key} {found!r}; {NAME} supports "
                    f"{value!r}",
                    SUPPORTED,
                )


def _stored(model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield a refusal's (reason, fix) for each fault of the checkpoint's tensors.

    No fault is found if the tensors' headers were not read (``model.tensors`` is empty).
    """
    modules = [
        name.removesuffix(".weight")
        for name, tensor in model.tensors.items()
        if tensor.dtype == "int8" and name.endswith(".weight")
    ]
    tensors = model.tensors
    again = "download the checkpoint again"
    if model.tensors and not modules and model.quant_method in METHODS:
        yield f"config.json has quant_method {model.quant_method}, but no weight is int8", SUPPORTED
    missing = [name for name in modules if f"{name}.weight_scale" not in tensors]
    if missing:
        yield f"{len(missing)} int8 weights have no weight_scale: {_some(missing)}", again
    rows = [
        name
        for name in modules
        if (scale := tensors.get(f"{name}.weight_scale")) is not None
        and scale.shape not in ((first := tensors[f"{name}.weight"].shape[0],), (first, 1))
    ]
    if rows:
        shape = list(tensors[f"{rows[0]}.weight_scale"].shape)
        yield (
            f"{len(rows)} weights have scales of a shape other than one per row: {_some(rows)} "
            f"({shape})",
            SUPPORTED,
        )
    for leaf, what in (
        ("weight_zero_point", "weights are asymmetric"),
        ("input_scale", "activation scales are static"),
        ("input_zero_point", "activations are asymmetric"),
    ):
        found = [name for name in modules if f"{name}.{leaf}" in tensors]
        if found:
            yield (
                f"the checkpoint's {what} ({leaf} of {_some(found)}); {NAME} supports symmetric "
                "weights and dynamic activation scales only",
                SUPPORTED,
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (
        f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    )


def stored_rows(weight: StoredWeight) -> dict[str, TensorFact]:
    """Return, by name, the checkpoint tensors that store a weight.

    They are int8 values and a scale for each row.
    """
    rows, columns = weight.rows, weight.columns
    return {
        "weight": TensorFact("int8", (rows, columns)),
        "weight_scale": TensorFact("float32", (rows, 1)),
    }


@hookimpl
def register_quantization_schemes() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=W8A8Int8Options,
            check=check_w8a8_int8,
            factory="glowplug.plugins.quantization.int8.runtime:w8a8_int8",
            offers=QuantizationOffers(
                reads=METHODS,
                stored=stored_rows,
                leaves=(
                    StoredLeaf("weight", 1, dtype="int8"),
                    StoredLeaf("weight_scale", NUMBER_BYTES, scale=True),
                ),
                online=True,
                dequantizes=frozenset({"cpu"}),
                cast_bytes=1.0,
                fused_shared=True,
                places_experts=True,
                experts_work=int8_experts,
            ),
            uses=LIBRARIES,
            summary="int8 weights with a scale per row, native or quantised while loading; "
            "activations quantised per token",
        )
    ]
