"""Structured output by the library llguidance."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component, Package
from glowplug.core.plugin.grammar_options import GrammarOptions
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import GrammarOffers
from glowplug.core.step.structured import KINDS


class LlguidanceOptions(GrammarOptions):
    use: Literal["llguidance"] = "llguidance"


@hookimpl
def register_grammars() -> list[Component]:
    return [
        Component(
            name="llguidance",
            options=LlguidanceOptions,
            factory="glowplug.plugins.grammar.llguidance_runtime:Llguidance",
            offers=GrammarOffers(kinds_of_grammar=frozenset(KINDS)),
            requires=(Package("llguidance", ">=1.7"),),
            summary="JSON schemas, regular expressions, EBNF, Lark, choices and structural tags by "
            "llguidance",
        )
    ]
