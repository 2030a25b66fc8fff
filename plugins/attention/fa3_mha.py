"""Multi-head attention by FlashAttention-3 of sgl_kernel, on Hopper."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from glowplug.core.component import Check, CheckContext, Component, Package
from glowplug.core.errors import Refusal
from glowplug.core.hookspecs import hookimpl
from glowplug.core.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.core.options import AttentionOptions
from glowplug.plugins.attention.library import HOPPER, SGL_KERNEL, SIXTEEN_BITS

NAME = "fa3_mha"
HEADS = (64, 96, 128, 192, 256)  #: numbers of a head that it is compiled for


class Fa3MhaOptions(AttentionOptions):
    use: Literal["fa3_mha"] = "fa3_mha"


def check_heads(name: str) -> Check:
    """Refuses heads of a size that the library is not compiled for, and a cache in another dtype of 16 bits."""

    def check(context: CheckContext) -> Iterator[Refusal]:
        model = context.facts.model
        if model.kind == "mha" and model.head_dim not in HEADS:
            yield Refusal(name, "attention.use", f"{name} is compiled for heads of {', '.join(map(str, HEADS))} "
                          f"numbers; this model's have {model.head_dim}", 'attention.use = "auto"')
        compute, kept = context.values["dtype"], context.values["kv_dtype"]
        if kept in SIXTEEN_BITS and kept != compute:
            yield Refusal(name, "attention.kv_dtype", f"{name} reads a cache of the compute dtype {compute}, not "
                          f"{kept}", 'attention.kv_dtype = "auto"')

    return check


@hookimpl
def register_attention_backends() -> list[Component]:
    return [Component(
        name=NAME, options=Fa3MhaOptions, check=check_heads(NAME),
        factory="glowplug.plugins.attention.fa3_mha_runtime:Fa3Mha",
        requires=(Package(SGL_KERNEL, ">=0.4.2"), Package("triton", ">=3.5")),
        offers=AttentionOffers(
            kinds=frozenset({"mha"}), devices=frozenset({"cuda"}), compute=HOPPER, dtypes=SIXTEEN_BITS,
            kv_dtypes=SIXTEEN_BITS, first_key=True, modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER}),
        summary="multi-head and grouped-query attention by FlashAttention-3 (sgl_kernel), Hopper")]
