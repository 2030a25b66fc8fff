"""Multi-head attention by this project's own Triton kernels, without other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from glowplug.core.errors import Refusal
from glowplug.core.facts.kv_layout import head_entries
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, FLOAT_DTYPES, AttentionOffers
from glowplug.core.plugin.options import AttentionOptions
from glowplug.kernels.launch.cards import TILES
from glowplug.plugins.attention.shared.attention_tables import measured_time
from glowplug.plugins.attention.shared.prefill_bytes import mha_bytes

HEAD_DIM_MAX = 256  #: largest head size whose tiles fit into a multiprocessor


class TritonMhaOptions(AttentionOptions):
    use: Literal["triton_mha"] = "triton_mha"


def check_triton_mha(context: CheckContext) -> Iterator[Refusal]:
    """Refuse models with attention heads larger than the Triton kernels' tiles."""
    model = context.facts.model
    if model.kind == "mha" and model.head_dim > HEAD_DIM_MAX:
        yield Refusal(
            "triton_mha",
            "attention.use",
            f"triton_mha supports head sizes up to {HEAD_DIM_MAX}; this model's is "
            f"{model.head_dim}",
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
                measured=measured_time("triton_mha"),
                devices=frozenset({"cuda"}),
                kinds=frozenset({"mha"}),
                kv_entries=head_entries,
                kv_dtypes=FLOAT_DTYPES | {"fp8_e4m3", "fp8_e5m2"},
                modes=dict(EVERY_MODE_GRAPH),
                tree=True,
                first_key=True,
                work=mha_bytes,
                compute=TILES,
            ),
            summary="multi-head and grouped-query attention in Triton, for causal chains and "
            "trees, with a 16-bit or FP8 cache",
        )
    ]
