"""Permitted errors of an engine, by the number formats that it rounds to.

A number format with p significant bits rounds with a relative error of up to 2 ** -p. A layer
rounds a few times one after the other: inputs and results of GEMMs, norms and the attention. Its
permitted error is a small multiple of the format's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.registry import PluginSet

#: format -> relative rounding error
ROUNDING = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "fp8_e4m3": 2.0**-4,
    "fp8_e5m2": 2.0**-3,
}
#: roundings of a layer one after the other, as a multiple of the compute dtype's error
LAYER_ROUNDINGS = 8
#: error of a layer in float32: sums of thousands of terms in another order
FLOAT32_LAYER = 1e-4
#: float32 GEMMs of a GPU may round their inputs to 11 significant bits (TF32)
TF32_LAYER = LAYER_ROUNDINGS * 2.0**-11
#: error of a layer whose GEMMs read activations in 8 bits: two E4M3 roundings (one for the input,
#: one for the inner activations), which also bounds int8 with a scale for each token
EIGHT_BIT_LAYER = 2 * ROUNDING["fp8_e4m3"]
#: share of the tokens of a step whose error counts. The others may have other experts than in the
#: reference: gates near a tie choose by the last bits
COUNTED_SHARE = 0.9
#: permitted divergence of the logits in nats (median over the tokens), without and with 8-bit
#: formats: the errors of all layers add up
KL_FLOAT32 = 1e-4
KL_16_BIT = 0.02
KL_8_BIT = 0.1


@dataclass(frozen=True)
class Tolerance:
    """Permitted errors.

    Attributes:
        layer: error of a layer, relative to what it adds to the stream.
        stream: relative rounding error of the stream itself, which a layer stores.
        head: error of the logits, relative to their size.
        kl: median divergence of the logits in nats.
        share: share of the tokens whose error counts.
        reason: the formats that these follow from.
    """

    layer: float
    stream: float
    head: float
    kl: float
    share: float
    reason: str


def tolerance_of(plan: EnginePlan, plugins: PluginSet, formats: Sequence[str]) -> Tolerance:
    """Return the permitted errors of an engine.

    Args:
        plan: the engine's plan.
        plugins: the loaded plugins.
        formats: input formats of the engine's GEMMs that round activations.
    """
    exact = plan.dtype == "float32"
    plain = LAYER_ROUNDINGS * ROUNDING[plan.dtype]
    if exact:
        plain = FLOAT32_LAYER if plan.device == "cpu" else TF32_LAYER
    layer = plain
    reasons = [f"compute dtype {plan.dtype}"]
    if formats:
        layer += EIGHT_BIT_LAYER
        reasons.append(f"activations rounded to {', '.join(formats)}")
    if quantizes_weights(plan, plugins):
        layer += EIGHT_BIT_LAYER
        reasons.append("weights quantised while loading")
    if plan.kv_dtype != plan.dtype:
        layer += 2 * ROUNDING.get(plan.kv_dtype, ROUNDING["fp8_e5m2"])
        reasons.append(f"KV cache in {plan.kv_dtype}")
    narrow = layer > plain
    return Tolerance(
        layer=layer,
        stream=ROUNDING[plan.dtype],
        head=plain,
        kl=KL_8_BIT if narrow else KL_FLOAT32 if exact else KL_16_BIT,
        share=1.0 if exact and not narrow else COUNTED_SHARE,
        reason="; ".join(reasons),
    )


def quantizes_weights(plan: EnginePlan, plugins: PluginSet) -> bool:
    """Return whether the engine quantises the weights of an unquantised checkpoint."""
    found = plugins.find("quantization", plan.choice("quantization").name)
    offers = found.component.offers if found is not None else None
    return (
        isinstance(offers, QuantizationOffers) and plan.facts.model.quant_method not in offers.reads
    )
