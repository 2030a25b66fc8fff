"""Construction of a rank's grammars and of the builder that compiles them.

Torch is imported for ranks only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glowplug.core.engine.blame import failure_of
from glowplug.core.engine.grammar_builder import GrammarBuilder
from glowplug.core.errors import GlowplugError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.grammar_options import GrammarOptions
from glowplug.core.plugin.offers import GrammarOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import GrammarBackend, Worker
from glowplug.core.startup.components import build_component
from glowplug.core.text.find_tokenizer import find_tokenizer
from glowplug.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from glowplug.core.engine.grammars import RankGrammars


def grammar_kinds(plan: EnginePlan, plugins: PluginSet | None) -> frozenset[str]:
    """Return the kinds of grammars that the plan's engine serves; none without ``plugins``."""
    choices = plan.choices_in("grammar")
    offers = plugins.offers("grammar", choices[0].name) if plugins and choices else None
    if not isinstance(offers, GrammarOffers) or plan.config.get("skip_tokenizer"):
        return frozenset()
    return offers.kinds_of_grammar


def grammar_options(plan: EnginePlan) -> GrammarOptions:
    """Return the options that are common to all grammar libraries."""
    choices = plan.choices_in("grammar")
    options = choices[0].options if choices else {"use": "none"}
    return GrammarOptions.model_validate(
        {name: value for name, value in options.items() if name in GrammarOptions.model_fields}
    )


def grammar_builder(plan: EnginePlan, plugins: PluginSet, worker: Worker) -> GrammarBuilder:
    """Return the builder of the plan's grammars; the first grammar opens the tokenizer."""
    backend: GrammarBackend = build_component(plugins, plan.choice("grammar"), plan, worker)

    def opened() -> Tokenizer:
        tokenizer = find_tokenizer(plan, plugins)
        if tokenizer is None:
            raise GlowplugError("the tokenizer of the front is not found on this rank")
        return tokenizer

    vocab = plan.facts.model.vocab_size
    return GrammarBuilder(
        backend,
        opened,
        vocab,
        grammar_options(plan).cache_bytes,
        lambda error: failure_of(error, plan, "compile a request's grammar"),
    )


def rank_grammars(plan: EnginePlan, plugins: PluginSet, worker: Worker) -> RankGrammars:
    """Return the grammars of a rank."""
    import torch

    from glowplug.core.engine.grammars import RankGrammars
    from glowplug.core.engine.masks import StepMasks

    if not grammar_kinds(plan, plugins):
        return RankGrammars()
    builder = grammar_builder(plan, plugins, worker)
    shape = plan.sizes.draft_shape
    drafts = 0 if shape.is_tree else shape.tokens - 1
    masks = StepMasks(builder.backend, builder.vocab, torch.device(worker.device), drafts)
    return RankGrammars(builder, masks)
