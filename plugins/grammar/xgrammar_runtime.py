"""Runtime of the grammar library "xgrammar"."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import xgrammar

from glowplug.core.errors import RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Masks, Matcher, Worker
from glowplug.core.step.structured import GrammarSpec
from glowplug.plugins.grammar.apply_masks import forbid_on
from glowplug.plugins.grammar.xgrammar import XgrammarOptions
from glowplug.plugins.grammar.xgrammar_tags import structural_tag

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.text.tokenizer import Tokenizer

WHITESPACE = 32  #: most characters of white space between two tokens of JSON
THREADS = 2  #: threads that compile one grammar
#: most characters of forced text that become tokens in one step, more than any chain of drafts has;
#: a long constant would else be encoded whole in each of its steps
FORCED_TEXT = 256


class XgrammarMatcher:
    """The ``protocols.Matcher`` around the library's.

    Args:
        inner: the library's matcher.
        tokenizer: the model's tokenizer, for forced text.
    """

    def __init__(self, inner: Any, tokenizer: Tokenizer) -> None:
        self.inner = inner
        self._tokenizer = tokenizer

    def accept(self, token: int) -> bool:
        return bool(self.inner.accept_token(token))

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)

    def fill(self, mask: Masks) -> None:
        self.inner.fill_next_token_bitmask(mask[None])

    def forced(self) -> Seq[int]:
        """Return the tokens of the text that must follow.

        The model may divide the text in another way. Its tokens are drafts, which are verified.
        """
        try:
            text = self.inner.find_jump_forward_string()
        except UnicodeDecodeError:  # NOTE: the forced bytes begin or end within a character
            return ()
        return self._tokenizer.encode(text[:FORCED_TEXT], False) if text else ()

    def complete(self) -> bool:
        return bool(self.inner.is_completed())

    def error(self) -> str:
        return ""


class XgrammarGrammar:
    """The ``protocols.CompiledGrammar`` around the library's."""

    def __init__(self, inner: Any, tokenizer: Tokenizer) -> None:
        self._inner = inner
        self._tokenizer = tokenizer
        self.size = int(inner.memory_size_bytes)

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._inner), self._tokenizer)


class Xgrammar:
    """The ``protocols.GrammarBackend`` of xgrammar."""

    def __init__(self, options: XgrammarOptions, plan: EnginePlan, worker: Worker) -> None:
        self._device = worker.device
        self._forbid: Any = None

    def open(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        # no text has the byte 0xff: special tokens stay out of grammars that do not name their ids.
        # A token without bytes would be out of all of them
        added = tokenizer.backend.get_added_tokens_decoder()
        special = {token for token, entry in added.items() if entry.special}
        self._special = {added[token].content: token for token in special if token < vocab}
        names = [
            b"\xff%d" % token if token in special else tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        ]
        info = xgrammar.TokenizerInfo(
            names, vocab_size=vocab, stop_token_ids=list(tokenizer.eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> XgrammarGrammar:
        try:
            return XgrammarGrammar(self._compiled(spec), self._tokenizer)
        except Exception as error:  # NOTE: the library raises plain errors of many types
            lines = str(error).strip().splitlines() or ["unknown error"]
            raise RequestError(f"the grammar is not supported: {lines[-1][:300]}") from None

    def _compiled(self, spec: GrammarSpec) -> Any:
        compiler = self._compiler
        if spec.kind == "json_schema":
            return compiler.compile_json_schema(
                spec.text,
                any_whitespace=spec.whitespace,
                separators=None if spec.whitespace else (",", ":"),
                max_whitespace_cnt=WHITESPACE if spec.whitespace else None,
            )
        if spec.kind == "regex":
            return compiler.compile_regex(spec.text)
        if spec.kind == "choice":
            options = " | ".join(json.dumps(one) for one in json.loads(spec.text))
            return compiler.compile_grammar(f"root ::= {options}")
        if spec.kind == "structural_tag":
            tag = structural_tag(json.loads(spec.text), self._special, WHITESPACE)
            return compiler.compile_structural_tag(tag)
        if "::=" in spec.text:
            return compiler.compile_grammar(spec.text)
        return compiler.compile_lark(spec.text)

    def fill(self, wanted: Seq[tuple[Matcher, int]], masks: Masks) -> None:
        for matcher, row in wanted:
            matcher.fill(masks[row])

    def forbid(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        if self._forbid is None:
            self._forbid = forbid_on(self._device)
        self._forbid(logits, rows, masks)
