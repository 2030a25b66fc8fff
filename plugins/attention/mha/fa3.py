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
from glowplug.plugins.attention.shared.hopper_libraries import HOPPER, SGL_KERNEL
from glowplug.plugins.attention.shared.prefill_bytes import mha_bytes
from glowplug.plugins.attention.shared.table_bytes import fa3_mha_bytes

NAME = "fa3_mha"
HEAD_DIM = 128  #: the only head size tried with the library
# NOTE: a kernel that is missing from the library's build ends the process, so only sizes and dtypes
# that were seen to run are admitted.
DTYPES = frozenset({"bfloat16"})


class Fa3MhaOptions(AttentionOptions):
    use: Literal["fa3_mha"] = "fa3_mha"


def check_heads(name: str) -> Check:
    """Return a check that refuses head sizes not tried with the library.

    ``name``: name of the attention backend, for the refusal.
    """

    def check(context: CheckContext) -> Iterator[Refusal]:
        model = context.facts.model
        if model.kind == "mha" and model.head_dim != HEAD_DIM:
            yield Refusal(
                name,
                "attention.use",
                f"{name} supports a head size of {HEAD_DIM}; this model's is {model.head_dim}",
                'attention.use = "auto"',
            )

    return check


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=Fa3MhaOptions,
            check=check_heads(NAME),
            factory="glowplug.plugins.attention.mha.fa3_runtime:Fa3Mha",
            requires=(Package(SGL_KERNEL, ">=0.4.2"), Package("triton", ">=3.5")),
            offers=AttentionOffers(
                measured=measured_time("fa3_mha"),
                kinds=frozenset({"mha"}),
                kv_entries=head_entries,
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=DTYPES,
                kv_dtypes=DTYPES,
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mha_bytes,
                reserves=fa3_mha_bytes,
            ),
            summary="multi-head and grouped-query attention by FlashAttention-3 (sgl_kernel), "
            "Hopper",
        )
    ]
