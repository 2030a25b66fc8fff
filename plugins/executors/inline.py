"""Executor of one rank in the caller's own process and thread, the default for offline use."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ExecutorOffers
from glowplug.core.plugin.options import ExecutorOptions


class InlineOptions(ExecutorOptions):
    use: Literal["inline"] = "inline"

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        return {
            **super().without_effect(context),
            **dict.fromkeys(("start_timeout", "watchdog"), "the rank runs in the calling process"),
        }


@hookimpl
def register_executors() -> list[Component]:
    return [
        Component(
            name="inline",
            options=InlineOptions,
            factory="glowplug.plugins.executors.inline_runtime:InlineExecutor",
            offers=ExecutorOffers(ranks=False, hosts=False),
            summary="one rank in the calling process",
        )
    ]
