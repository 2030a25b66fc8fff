"""No structured output."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.grammar_options import GrammarOptions
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import GrammarOffers


class NoGrammarOptions(GrammarOptions):
    use: Literal["none"] = "none"


@hookimpl
def register_grammars() -> list[Component]:
    return [
        Component(
            name="none",
            options=NoGrammarOptions,
            factory="glowplug.plugins.grammar.none_runtime:NoGrammars",
            offers=GrammarOffers(),
            summary="requests for structured output are refused",
        )
    ]
