"""Structured output by the library xgrammar."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component, Package
from glowplug.core.plugin.grammar_options import GrammarOptions
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import GrammarOffers
from glowplug.core.step.structured import KINDS


class XgrammarOptions(GrammarOptions):
    use: Literal["xgrammar"] = "xgrammar"


@hookimpl
def register_grammars() -> list[Component]:
    return [
        Component(
            name="xgrammar",
            options=XgrammarOptions,
            factory="glowplug.plugins.grammar.xgrammar_runtime:Xgrammar",
            offers=GrammarOffers(kinds_of_grammar=frozenset(KINDS)),
            requires=(Package("xgrammar", ">=0.2.8"),),
            summary="JSON schemas, regular expressions, EBNF, Lark, choices and structural tags by "
            "xgrammar",
        )
    ]
