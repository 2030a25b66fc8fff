"""Runtime of the grammar library "none"."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from glowplug.core.errors import RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import CompiledGrammar, Masks, Matcher, Worker
from glowplug.core.step.structured import GrammarSpec
from glowplug.plugins.grammar.none import NoGrammarOptions

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.text.tokenizer import Tokenizer


class NoGrammars:
    """The ``protocols.GrammarBackend`` that refuses every grammar."""

    def __init__(self, options: NoGrammarOptions, plan: EnginePlan, worker: Worker) -> None:
        return

    def open(self, tokenizer: Tokenizer, vocab: int) -> None:
        return

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        raise RequestError("this engine runs without structured output (grammar.use = none)")

    def fill(self, wanted: Seq[tuple[Matcher, int]], masks: Masks) -> None:
        return

    def forbid(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        return
