"""A plugin for tests: the attention backend "short_mla", which is "torch_mla" with some batch sizes
captured a second time for short rows.
"""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_EAGER, AttentionOffers
from glowplug.plugins.attention.mla.torch import TorchMlaOptions
from glowplug.plugins.attention.shared.kv_layout import parted_latent_entries

KEYS = 24
ROWS = range(2, 5)


class ShortMlaOptions(TorchMlaOptions):
    use: Literal["short_mla"] = "short_mla"  # type: ignore[assignment]


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="short_mla",
            options=ShortMlaOptions,
            factory="tests.plugins.short_rows_runtime:ShortMla",
            offers=AttentionOffers(
                kinds=frozenset({"mla"}),
                modes=dict(EVERY_MODE_EAGER),
                first_key=True,
                kv_entries=parted_latent_entries,
                short_keys=KEYS,
                short_rows=lambda heads: ROWS,
            ),
            summary="torch_mla, told how long rows may be",
        )
    ]
