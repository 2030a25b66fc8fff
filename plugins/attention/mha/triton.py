"""Multi-head attention by this project's own Triton kernels, on CUDA devices: needs no library
beside Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, FLOAT_DTYPES, AttentionOffers
from glowplug.core.plugin.options import AttentionOptions
from glowplug.kernels.launch.cards import TILES
from glowplug.plugins.attention.shared.prefill_bytes import mha_bytes

LARGEST = 256  #: numbers of a head whose tiles fit a multiprocessor


class TritonMhaOptions(AttentionOptions):
    use: Literal["triton_mha"] = "triton_mha"


def check_triton_mha(context: CheckContext) -> Iterator[Refusal]:
    model = context.facts.model
    if model.kind == "mha" and model.head_dim > LARGEST:
        yield Refusal(
            "triton_mha",
            "attention.use",
            f"triton_mha takes heads of {LARGEST} numbers at most; this "
            f"model's have {model.head_dim}",
            'attention.use = "torch_mha"',
        )


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="triton_mha",
            options=TritonMhaOptions,
            check=check_triton_mha,
            factory="glowplug.plugins.attention.mha.triton_runtime:TritonMha",
            requires=(Package("triton", ">=3.5"),),
            offers=AttentionOffers(
                devices=frozenset({"cuda"}),
                kinds=frozenset({"mha"}),
                kv_dtypes=FLOAT_DTYPES | {"fp8_e4m3", "fp8_e5m2"},
                modes=dict(EVERY_MODE_GRAPH),
                tree=True,
                first_key=True,
                work=mha_bytes,
                compute=TILES,
            ),
            summary="multi-head and grouped-query attention in Triton, of causal chains and trees, "
            "with 16 bits or FP8 in the cache",
        )
    ]
