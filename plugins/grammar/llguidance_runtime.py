"""Runtime of the grammar library "llguidance".

The library is imported with the first grammar: an environment without it serves all other requests.
Torch is imported with the first mask.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from glowplug.core.errors import RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Masks, Matcher, Worker
from glowplug.core.step.structured import GrammarSpec
from glowplug.plugins.grammar.apply_masks import forbid_on
from glowplug.plugins.grammar.lark_forms import WHITESPACE
from glowplug.plugins.grammar.llguidance import LlguidanceOptions
from glowplug.plugins.grammar.structural_lark import structural_lark

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.text.tokenizer import Tokenizer

#: states of the lexer after which a grammar is given up; a state takes 1 to 2 kB
LEXER_STATES = 50_000
#: expressions that the lexer may make for one mask, on the engine's thread. Patterns for addresses
#: of pages and of mail with several ``\w`` need more than 20,000; 60,000 stopped none of 9 patterns
#: in 600 random texts. A mask of 5000 times ``x*`` takes 180 ms until this limit, one of 8000 times
#: 2 ms, and 490 ms with the library's 200,000
STEP_FUEL = 60_000
#: bytes of a compiled grammar, an upper estimate. The library states none. Measured were 115 kB for
#: an object without properties, 116 kB for random schemas (0.5 kB of text), 162 kB for one string
#: of format "uri", 245 kB for nine formats (0.6 kB) and 1180 kB for 60 objects (9.3 kB)
BASE_BYTES = 1 << 17
BYTES_PER_BYTE = 256
#: bytes of each Unicode class in it: ``\p{L}{1,50} \w+``, with two, takes 611 kB
CLASS_BYTES = 1 << 18
CLASSES = re.compile(r"\\[pPwW]")
SILENT = 0  #: log level of the library
#: tokens of the masks of a step from which on the library's threads fill them. To wake the threads
#: takes longer than a few small masks: 32 masks of 2048 tokens take 0.25 ms on the engine's thread,
#: and 1.2 ms on a thread of the library beside a busy engine
PARALLEL_TOKENS = 1 << 19
PARALLEL_CORES = 3  #: cores from which on the library has more than one thread


class LlguidanceMatcher:
    """The ``protocols.Matcher`` around the library's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def accept(self, token: int) -> bool:
        return bool(self.inner.consume_token(token))

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)

    def fill(self, mask: Masks) -> None:
        self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def forced(self) -> Seq[int]:
        return self.inner.compute_ff_tokens()  # type: ignore[no-any-return]

    def complete(self) -> bool:
        return bool(self.inner.is_accepting())

    def error(self) -> str:
        return _first_line(self.inner.get_error()) if self.inner.is_error() else ""


class LlguidanceGrammar:
    """The ``protocols.CompiledGrammar``: a matcher at its beginning, which is copied."""

    def __init__(self, first: Any, size: int) -> None:
        self._first = first
        self.size = size

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._first.deep_copy())


class Llguidance:
    """The ``protocols.GrammarBackend`` of llguidance."""

    def __init__(self, options: LlguidanceOptions, plan: EnginePlan, worker: Worker) -> None:
        self._device = worker.device
        self._forbid: Any = None
        self._parallel = len(os.sched_getaffinity(0)) >= PARALLEL_CORES

    def open(self, tokenizer: Tokenizer, vocab: int) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                f"structured output needs llguidance, which cannot be imported here: {error}"
            ) from None
        self._new_matcher = llguidance.LLMatcher
        self._tokens = llguidance.LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=vocab, eos_token=list(tokenizer.eos_ids)
        )
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special = {
            entry.content: token
            for token, entry in added.items()
            if token < vocab and self._tokens.is_special_token(token)
        }
        self._ends = tokenizer.eos_ids
        self._executor = llguidance.LLExecutor()
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=LEXER_STATES, step_lexer_fuel=STEP_FUEL, verbose_errors=False
        )

    def compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
        text = _grammar_of(spec, self._special, self._ends)
        matcher = self._new_matcher(self._tokens, text, log_level=SILENT, limits=self._limits)
        if matcher.is_error():
            raise RequestError(f"the grammar is not supported: {_first_line(matcher.get_error())}")
        return LlguidanceGrammar(matcher, size_of(text))

    def fill(self, wanted: Seq[tuple[Matcher, int]], masks: Masks) -> None:
        inner = [(matcher.inner, row) for matcher, row in wanted]  # type: ignore[attr-defined]
        rows, words = masks.shape
        size = words * np.dtype(np.int32).itemsize
        start = masks.ctypes.data
        if self._parallel and len(inner) > 1 and 32 * words * len(inner) >= PARALLEL_TOKENS:
            self._executor.unsafe_compute_mask_ptr(inner, start, size, rows)
            return
        for matcher, row in inner:
            matcher.unsafe_compute_mask_ptr(start + row * size, size)

    def forbid(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        if self._forbid is None:
            self._forbid = forbid_on(self._device)
        self._forbid(logits, rows, masks)


def size_of(text: str) -> int:
    """Return an upper estimate of the bytes of a compiled grammar.

    ``text``: the grammar in the library's own form.
    """
    classes = len(CLASSES.findall(text))
    return BASE_BYTES + BYTES_PER_BYTE * len(text.encode()) + CLASS_BYTES * classes


def _grammar_of(spec: GrammarSpec, special: Mapping[str, int], ends: Iterable[int]) -> str:
    """Return the grammar in the library's own form.

    ``special`` and ``ends``: see :func:`structural_lark`.

    Raises:
        RequestError: it cannot be converted.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if spec.kind == "json_schema":
            return _schema(spec)
        if spec.kind == "regex":
            return str(LLMatcher.grammar_from_regex(spec.text))
        if spec.kind == "choice":
            options = " | ".join(json.dumps(one) for one in json.loads(spec.text))
            return str(LLMatcher.grammar_from_lark(f"start: {options}"))
        if spec.kind == "structural_tag":
            return structural_lark(json.loads(spec.text), special, ends)
        return str(LLMatcher.grammar_from_lark(any_to_lark(spec.text)))
    except RequestError:
        raise
    except Exception as error:  # NOTE: the converters raise plain errors of many types
        raise RequestError(f"the grammar is not supported: {_first_line(str(error))}") from None


def _schema(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    settings: Any = (
        {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
        if spec.whitespace
        else {"whitespace_flexible": False}
    )
    return str(LLMatcher.grammar_from_json_schema(spec.text, overrides=settings))


def _first_line(text: str) -> str:
    """Return the first line of an error, shortened."""
    return (text.strip().splitlines() or ["unknown error"])[0][:300]
