"""Grammars of a rank: compiled in a thread, and awaited by their sequences."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

from glowplug.core.engine.constraint import SequenceGrammar
from glowplug.core.engine.grammar_builder import GrammarBuilder
from glowplug.core.engine.masks import StepMasks
from glowplug.core.errors import RequestError
from glowplug.core.step.request import Sequence

POLL_SECONDS = 0.002  #: pause of an engine that has nothing to do but to wait for a grammar


class RankGrammars:
    """The grammars of one rank: sequences that wait for theirs, and the masks of its steps.

    All ranks hold and release the same sequences in the same turns: rank 0 reports those whose
    grammar it has compiled, and the others wait for their own result.

    Args:
        builder: compiles grammars; None: the engine runs without structured output.
        masks: the masks of the rank's steps; None as above.
    """

    def __init__(
        self, builder: GrammarBuilder | None = None, masks: StepMasks | None = None
    ) -> None:
        self.masks = masks
        self._builder = builder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="glowplug-grammar")
        self._held: dict[int, tuple[Sequence, Future[SequenceGrammar]]] = {}

    @property
    def active_masks(self) -> StepMasks | None:
        """The masks, if the step that has begun has any."""
        return self.masks if self.masks is not None and self.masks.active else None

    @property
    def holds(self) -> bool:
        """A sequence waits for its grammar."""
        return bool(self._held)

    def hold(self, sequence: Sequence) -> None:
        """Begin to compile the grammar of ``sequence``, which waits until it is released.

        One that is cached is done at once, so that requests of a batch start in the same step.

        Raises:
            RequestError: the engine runs without structured output.
        """
        spec = sequence.params.grammar
        assert spec is not None, "only sequences with a grammar are held"
        if self._builder is None:
            raise RequestError("this engine runs without structured output")
        known = self._builder.known(spec)
        if known is None:
            found = self._pool.submit(self._builder.build, spec)
        else:
            found = Future()
            found.set_result(known)
        self._held[sequence.id] = (sequence, found)

    def ready(self) -> list[tuple[int, str]]:
        """Return (sequence id, error) of the held sequences whose grammar is done; "": it is good.

        Rank 0 calls it, and all ranks ``release`` these sequences in the same turn.
        """
        return [
            (id, _error_of(compiled)) for id, (_, compiled) in self._held.items() if compiled.done()
        ]

    def release(self, ready: Seq[tuple[int, str]]) -> list[tuple[Sequence, str]]:
        """Release sequences, and return each with the error of its grammar, "" if it is good."""
        found = []
        for id, error in ready:
            sequence, compiled = self._held.pop(id)
            if not error:
                sequence.grammar = compiled.result()
            found.append((sequence, error))
        return found

    def drop(self, ids: Iterable[int]) -> list[int]:
        """Drop held sequences; return the ids of those that were held."""
        return [id for id in ids if self._held.pop(id, None) is not None]

    def pause(self) -> None:
        """Wait a moment for a grammar, when the engine has nothing else to do."""
        time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Stop the thread once it has compiled its grammar."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _error_of(compiled: Future[SequenceGrammar]) -> str:
    """Return the error of a grammar that is done; "" if it is good."""
    error = compiled.exception()
    if error is None:
        return ""
    return str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
