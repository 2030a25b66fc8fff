"""Pieces of a step that a graph runner may capture and replay, because they need no host work.

A step's code names its pieces and is the same with and without graphs: ``DIRECT`` just runs them.
Within the model's pass, layers mark the calls that cannot be part of a graph
(:class:`SplitPoints`). A draft's pass over a prompt's tokens is a pass of its own
(:class:`DraftExtend`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


class GraphPieces(Protocol):
    """A runner of the pieces of one batch's step.

    The code between two pieces runs on the host in every step.
    """

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Run a piece, or replay the graph that was captured under its name.

        A replay reads and writes the same memory as the capture, so all tensors that ``work`` reads
        must be in persistent buffers. ``work`` must not wait for the device, and must not depend on
        values on the host.

        Args:
            name: name of the piece.
            work: the piece.

        Returns:
            The result of ``work``: tensors, or tuples or dataclasses of tensors.
        """
        ...

    def key(self, name: str) -> object | None:
        """Return the key of a piece's graph, to be passed to ``AttentionBackend.plan_step``.

        The key is the same object in every step; None for an eager step.
        """
        ...


class Direct:
    """The ``GraphPieces`` of an eager step: every piece is run, none is replayed."""

    def run(self, name: str, work: Callable[[], T]) -> T:
        return work()

    def key(self, name: str) -> object | None:
        return None


DIRECT = Direct()  #: the pieces of an eager step


#: function of tensors [T, ...] over T tokens -> [T, width]; it may read attention's planned step
SplitCall = Callable[..., "Tensor"]


class SplitPoints:
    """The calls in a model's pass at which piecewise graphs are split.

    These calls depend on more than the number of tokens: on lengths, pages, or the plan of this
    step. The code between two split points treats each token independently, so it may be captured
    for more tokens than a step has, and replayed. A rank has one object, and its layers call
    through it.

    Attributes:
        replacement: replacement of every call while a graph runner captures a pass; None: ``work``
            is called directly.
        kv_slots: KV slots of the tokens of the pass that is captured, int64 [T], in memory that a
            replay fills; slot 0 for padding. None: no pass is captured.
    """

    def __init__(self) -> None:
        self.replacement: Callable[[SplitCall, tuple[Tensor, ...], int], Tensor] | None = None
        self.kv_slots: Tensor | None = None

    def call(self, work: SplitCall, rows: tuple[Tensor, ...], width: int) -> Tensor:
        """Return ``work(*rows)``, or the result of ``replacement`` if one is set.

        The result is read before the next split point only. Apart from ``rows`` and the step's
        plan, ``work`` must read the same data in every step.

        Args:
            work: the function.
            rows: tensors [T, ...].
            width: width of the result.

        Returns:
            [T, width], with the dtype of the first of ``rows``.
        """
        return work(*rows) if self.replacement is None else self.replacement(work, rows, width)


#: function of input ids, positions and KV slots (int64 [F] each) and the hidden states [F, hidden]
#: of the preceding tokens
Extend = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], None]


@dataclass(frozen=True)
class ExtendWork:
    """A draft's pass over the tokens of a step, in a form that can be captured.

    Attributes:
        extend: the pass. It stores the cache entries of each of F tokens independently and runs on
            the device alone, so it may be captured for more tokens: the padding is token 0 at
            position 0 and KV slot 0.
        hidden: width of the hidden states that are passed to ``extend``.
        dtype: dtype of these hidden states.
    """

    extend: Extend
    hidden: int
    dtype: torch.dtype


class DraftExtend:
    """A draft's pass over the tokens of a step (``Mode.DRAFT_EXTEND``), which may be replayed.

    A rank has one object. The speculative algorithm sets the pass and calls it here in an eager
    step (``batch.pieces`` is ``DIRECT``). In a captured step the pass is part of the step's pieces;
    or, if it is ``apart``, the algorithm leaves it out, and ``after`` runs it eagerly behind the
    last piece. The call reads ``hidden`` of the target's pass and may
    overwrite that pass's results, so nothing may read them afterwards.

    Attributes:
        work: the pass; set by the algorithm in ``reserve``; None if it has no such pass.
        replacement: replacement of every call once a graph runner has captured the pass; None:
            ``work`` is called directly.
        apart: whether captured steps leave the pass out (``graphs.draft_extend = false``).
        after: the pass of a captured step that has left it out, a function of the batch, the
            accepted tokens and the hidden states; set by the algorithm in ``reserve``.
    """

    def __init__(self, apart: bool = False) -> None:
        self.apart = apart
        self.after: Callable[[Any, Any, Tensor], None] | None = None
        self.work: ExtendWork | None = None
        self.replacement: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] | None = None

    def call(
        self, ids: Tensor, positions: Tensor, kv_slots: Tensor, hidden: Tensor, source: Tensor
    ) -> None:
        """Run the pass, or its replacement.

        Args:
            ids: int64 [F], input ids.
            positions: int64 [F].
            kv_slots: int64 [F], KV slots.
            hidden: [N, hidden], hidden states of the target.
            source: int64 [F], for each token the row of ``hidden`` that it continues.
        """
        if self.replacement is not None:
            self.replacement(ids, positions, kv_slots, hidden, source)
        else:
            assert self.work is not None, "the speculative algorithm has not set its pass"
            self.work.extend(ids, positions, kv_slots, hidden[source])

    def run_after(self, batch: Any, accepted: Any, hidden: Tensor) -> tuple[Any, Tensor]:
        """Run the pass behind a captured step that has left it out, and return the step's results.

        Args:
            batch: the step's ``Batch``.
            accepted: the step's ``Accepted``.
            hidden: [T, hidden], hidden states of the target.

        Returns:
            ``accepted`` and ``hidden``.
        """
        if self.apart and self.after is not None and batch.pieces is not DIRECT:
            self.after(batch, accepted, hidden)
        return accepted, hidden
