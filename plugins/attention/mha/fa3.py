"""Multi-head attention by FlashAttention-3 of sgl_kernel, on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from glowplug.core.errors import Refusal
from glowplug.core.facts.kv_layout import head_entries
from glowplug.core.plugin.component import Check, CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.core.plugin.options import AttentionOptions
from glowplug.plugins.attention.shared.attention_tables import measured_time
from glowplug.plugins.attention.shared.hopper_libraries import (
    HOPPER,
    SGL_KERNEL,
    SIXTEEN_BITS,
    check_kv_is_compute,
)
from glowplug.plugins.attention.shared.prefill_bytes import mha_bytes
from glowplug.plugins.attention.shared.table_bytes import fa3_mha_bytes

NAME = "fa3_mha"
#: head sizes that the library is compiled for. NOTE: a kernel that is missing from the library's
#: build ends the process. The published builds 0.4.2, 0.4.2.post2 and 0.4.10 define
#: ``run_mha_fwd_`` for Hopper with these sizes in both dtypes, split and paged.
HEAD_DIMS = frozenset({64, 96, 128, 192, 256})


class Fa3MhaOptions(AttentionOptions):
    use: Literal["fa3_mha"] = "fa3_mha"


def check_heads(name: str, sizes: frozenset[int]) -> Check:
    """Return a check that refuses other head sizes, and a KV cache not in the compute dtype.

    An 8-bit KV cache is left to the offers.

    Args:
        name: name of the attention backend, for the refusals.
        sizes: head sizes that the backend supports.
    """
    same_dtype = check_kv_is_compute(name)

    def check(context: CheckContext) -> Iterator[Refusal]:
        model = context.facts.model
        if model.kind == "mha" and model.head_dim not in sizes:
            shown = ", ".join(map(str, sorted(sizes)))
            yield Refusal(
                name,
                "attention.use",
                f"{name} supports head sizes of {shown}; this model's is {model.head_dim}",
                'attention.use = "auto"',
            )
        yield from same_dtype(context)

    return check


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=Fa3MhaOptions,
            check=check_heads(NAME, HEAD_DIMS),
            factory="glowplug.plugins.attention.mha.fa3_runtime:Fa3Mha",
            requires=(Package(SGL_KERNEL, ">=0.4.2"), Package("triton", ">=3.5")),
            offers=AttentionOffers(
                measured=measured_time("fa3_mha"),
                kinds=frozenset({"mha"}),
                kv_entries=head_entries,
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=SIXTEEN_BITS,
                kv_dtypes=SIXTEEN_BITS,
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mha_bytes,
                reserves=fa3_mha_bytes,
            ),
            summary="multi-head and grouped-query attention by FlashAttention-3 (sgl_kernel), "
            "Hopper",
        )
    ]
