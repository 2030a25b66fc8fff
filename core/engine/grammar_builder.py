"""Grammars compiled from requests, and those that are kept. Torch is not imported."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from glowplug.core.engine.constraint import SequenceGrammar, TagTokens
from glowplug.core.errors import RequestError
from glowplug.core.protocols import CompiledGrammar, GrammarBackend
from glowplug.core.step.structured import GrammarSpec

if TYPE_CHECKING:
    from glowplug.core.text.tokenizer import Tokenizer


class GrammarCache:
    """Compiled grammars by their key, limited in bytes; the least recently used ones go first.

    Threads may share it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._held: OrderedDict[tuple[str, str, bool], CompiledGrammar] = OrderedDict()
        self.size = 0

    def get(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """Return the compiled grammar of ``spec``, or None."""
        with self._lock:
            found = self._held.get(spec.key)
            if found is not None:
                self._held.move_to_end(spec.key)
            return found

    def put(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        """Add a compiled grammar, and drop others until the limit is kept."""
        with self._lock:
            if spec.key in self._held or compiled.size > self._most:
                return
            self._held[spec.key] = compiled
            self.size += compiled.size
            while self.size > self._most:
                self.size -= self._held.popitem(last=False)[1].size


class GrammarBuilder:
    """Compiles the grammars of requests, one at a time, in any thread.

    ``known`` may be called in another thread meanwhile.

    Args:
        backend: the library.
        open_tokenizer: returns the model's tokenizer; called with the first grammar.
        vocab: number of tokens of a mask.
        cache_bytes: most bytes of grammars that are kept.
        failure: function from an exception of the library to the text of the refusal; None: type
            and message of the exception.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        open_tokenizer: Callable[[], Tokenizer],
        vocab: int,
        cache_bytes: int,
        failure: Callable[[Exception], str] | None = None,
    ) -> None:
        self.backend = backend
        self.vocab = vocab
        self.cache = GrammarCache(cache_bytes)
        self._open_tokenizer = open_tokenizer
        self._failure = failure or (lambda error: f"{type(error).__name__}: {error}")
        self._tags: dict[tuple[str, str], TagTokens] = {}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._open_tokenizer()
        if not tokenizer.eos_ids:
            raise RequestError(
                "structured output needs a token that ends a sequence, and this model has none"
            )
        self.backend.open(tokenizer, self.vocab)
        return tokenizer

    def build(self, spec: GrammarSpec) -> SequenceGrammar:
        """Return the compiled grammar of ``spec``, from the cache if it is there.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
        tokenizer = self._tokenizer
        compiled = self.cache.get(spec)
        if compiled is None:
            compiled = self._compiled(spec)
            self.cache.put(spec, compiled)
        tags = spec.opening, spec.closing
        if spec.closing and tags not in self._tags:
            pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
            eos = frozenset(tokenizer.eos_ids)
            self._tags[tags] = TagTokens(*tags, pieces, eos, self.vocab)
        return self._of_sequence(spec, compiled)

    def known(self, spec: GrammarSpec) -> SequenceGrammar | None:
        """Return the grammar of ``spec`` if nothing has to be compiled for it, else None."""
        compiled = self.cache.get(spec)  # one is cached once the tokenizer is open
        if compiled is None or (spec.closing and (spec.opening, spec.closing) not in self._tags):
            return None
        return self._of_sequence(spec, compiled)

    def _of_sequence(self, spec: GrammarSpec, compiled: CompiledGrammar) -> SequenceGrammar:
        """Return the grammar of one sequence; its tags are known."""
        tags = self._tags[spec.opening, spec.closing] if spec.closing else None
        return SequenceGrammar(compiled, spec, frozenset(self._tokenizer.eos_ids), tags)

    def _compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``; an exception of the library becomes a RequestError."""
        try:
            return self.backend.compile(spec)
        except (RequestError, MemoryError):
            raise
        except Exception as error:
            raise RequestError(self._failure(error)) from error
