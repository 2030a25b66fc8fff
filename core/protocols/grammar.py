"""Protocols of structured output: grammars that tokens must follow.

The way of the data:

1. The front states a request's grammar as a ``GrammarSpec``. A worker process of the front compiles
   it first, under limits of time, size, depth and memory, so that a hostile grammar becomes a
   refused request and nothing else (``entrypoints/front/grammar_checks.py``).
2. Each rank compiles the grammar in a thread, keeps it in a cache bounded in bytes, and holds the
   sequence until rank 0 reports the grammar as ready in a turn, so that all ranks queue the
   sequence in the same turn (``core/engine/grammars.py``).
3. A sequence that enters a row gets a :class:`Matcher`, which reads the tokens committed so far.
   After a preemption it is made again in the same way.
4. In each step the model's pass is launched first. While the device runs it, the host waits for the
   tokens of the step before, passes them to the matchers, and fills a mask for each position that
   is sampled: one, or with drafts one for each token of the row's chain or tree
   (``core/engine/masks.py``). The masks of the rows with a grammar are copied to the device, and
   ``forbid`` sets the logits of all other tokens to minus infinity, between the graphs of the pass
   and of sampling. Drafts that the grammar forbids are never drawn by the target, hence cut. Where
   the grammar leaves a single continuation, its tokens replace the drafts of the next step
   (``core/speculation/forced_drafts.py``).

Every rank makes the same masks from the same tokens. A mask has one bit for each token: bit t % 32
of word t // 32.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from glowplug.core.step.structured import GrammarSpec

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.text.tokenizer import Tokenizer

Masks = NDArray[np.int32]  #: [rows, words], one bit for each token


def words_of(vocab: int) -> int:
    """Return the number of int32 words of a mask over ``vocab`` tokens."""
    return -(-vocab // 32)


class Matcher(Protocol):
    """The state of one sequence in its grammar.

    Tokens that end a sequence are never passed to it.
    """

    def accept(self, token: int) -> bool:
        """Advance by a token; return False if the grammar forbids it, which ends the matcher."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens."""
        ...

    def fill(self, mask: Masks) -> None:
        """Write the tokens that may follow to ``mask`` [words], ends of the sequence included."""
        ...

    def forced(self) -> Seq[int]:
        """Return the tokens that follow, up to the first place where the grammar leaves a choice.

        They are offered as drafts, so a library may return fewer, or none.
        """
        ...

    def complete(self) -> bool:
        """Return whether the sequence may end here."""
        ...

    def error(self) -> str:
        """Return why the matcher has failed (a limit was exceeded); "" if it works."""
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar, from which matchers are made.

    Attributes:
        size: bytes of memory that it takes, or an upper estimate.
    """

    size: int

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of the grammar."""
        ...


class GrammarBackend(Protocol):
    """A library that compiles grammars and makes masks; ``GrammarOffers.kinds`` has its kinds."""

    def open(self, tokenizer: Tokenizer, vocab: int) -> None:
        """Read the tokens, before the first ``compile``.

        Args:
            tokenizer: the model's tokenizer, which has at least one ``eos_ids``.
            vocab: number of tokens of a mask.
        """
        ...

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar. The method may be called in another thread than the others.

        Raises:
            RequestError: the grammar is invalid, or needs more than the library can do.
        """
        ...

    def fill(self, wanted: Seq[tuple[Matcher, int]], masks: Masks) -> None:
        """Fill the rows of ``masks`` for (matcher, row), possibly in parallel.

        ``masks``: [rows, words].
        """
        ...

    def forbid(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits of forbidden tokens to minus infinity, in place and without waiting.

        On a GPU the method is also called once at the start, before ``open``.

        Args:
            logits: float32 [N, V].
            rows: rows of ``logits``, each at most once, int64 [n].
            masks: int32 [n, words].
        """
        ...
