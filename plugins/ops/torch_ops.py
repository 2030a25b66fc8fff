"""Small kernels in plain torch, for every device."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import OpsOffers
from glowplug.core.plugin.options import OpsOptions

#: names of the ops that every table has
TABLE = frozenset(
    {
        "rms_norm",
        "add_rms_norm",
        "silu_and_mul",
        "rope_table",
        "rope_at",
        "rope",
        "topk_softmax",
        "topk_sigmoid",
    }
)


class TorchOpsOptions(OpsOptions):
    use: Literal["torch"] = "torch"


@hookimpl
def register_ops() -> list[Component]:
    return [
        Component(
            name="torch",
            options=TorchOpsOptions,
            factory="glowplug.plugins.ops.torch_ops_runtime:TorchOps",
            offers=OpsOffers(ops=TABLE),
            summary="normalisation, rotation and gates in plain torch",
        )
    ]
