"""A plugin for tests: the base of the GPU backends of latent attention on the CPU, and ops whose
rotary factors are rows. With both, layers pass raw projections to attention.
"""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, OpsOffers
from glowplug.core.plugin.options import AttentionOptions, OpsOptions
from glowplug.plugins.ops.torch_ops import TABLE


class ProjectedMlaOptions(AttentionOptions):
    use: Literal["projected_mla"] = "projected_mla"


class RowsOpsOptions(OpsOptions):
    use: Literal["rows"] = "rows"


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="projected_mla",
            options=ProjectedMlaOptions,
            factory="tests.plugins.projected_mla_runtime:CountedMla",
            offers=AttentionOffers(
                kinds=frozenset({"mla"}), modes=dict(EVERY_MODE_GRAPH), first_key=True
            ),
        )
    ]


@hookimpl
def register_ops() -> list[Component]:
    return [
        Component(
            name="rows",
            options=RowsOpsOptions,
            factory="tests.plugins.projected_mla_runtime:RowsOps",
            offers=OpsOffers(ops=TABLE),
        )
    ]
