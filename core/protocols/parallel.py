"""Protocols of parallelism: shards of layers, expert exchange, request groups and collectives."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from glowplug.core.protocols.quantization import Quantized
from glowplug.core.step.batch import Batch, StepShape
from glowplug.core.step.request import Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A rank's part of a dimension: elements ``start`` to ``start + size`` of ``full``.

    Attributes:
        start: first element.
        size: number of elements.
        full: size of the whole dimension.
        reduce: True: the layer's output is a partial sum that must be all-reduced.
        gather: True: the layer's output is a slice that must be gathered.
        axis: mesh axis of the all-reduce or gather (named in ``core/facts/mesh.py``).
        parts: number of ranks that share the dimension. A part to be gathered is padded to
            ceil(full / parts) first.
    """

    start: int
    size: int
    full: int
    reduce: bool = False
    gather: bool = False
    axis: str = "tp"
    parts: int = 1


class ExpertExchange(Protocol):
    """The exchange of one layer's tokens with the ranks of their experts.

    Each step calls ``dispatch`` and ``combine`` once, in this order.

    An exchange with the attribute ``stays`` = True moves no tokens, because every rank has all of
    them. Then ``select(ids, batch)`` takes the place of ``dispatch``. It returns the ids of the
    experts on this rank, -1 for others, and the layer sums its results over the axes of its shards.
    ``batch`` may be None if no token is padding. An exchange with the attribute ``masks_padding`` =
    True receives the ids of the tokens of ``batch.padding.own`` as the gate has chosen them, and
    treats them as -1; others receive -1.

    Two further methods are optional. ``sends_quantized(input_format, batch) -> bool`` returns
    whether the step's tokens can be sent in the experts' input format. Then
    ``dispatch_quantized(x, ids, weights, batch)`` takes the place of ``dispatch``; it receives and
    returns ``Quantized`` tokens.
    """

    @property
    def load(self) -> Tensor | None:
        """Number of tokens that chose each expert so far, int64 [experts]; None: not counted.

        Over the ranks of a group every token counts once, padding never.
        """
        ...

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send this rank's attention tokens to the ranks of their experts.

        Args:
            x: [T, hidden].
            ids: chosen experts, int64 [T, K]; -1 for padding of the step.
            weights: float32 [T, K].
            batch: the step.

        Returns:
            x, ids and weights of the M tokens that this rank's experts compute; ids are local
            expert numbers, -1 for experts of other ranks.
        """
        ...

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        """Return the complete results of this rank's attention tokens, [T, hidden].

        Args:
            y: this rank's results, perhaps partial sums, [M, hidden]; may be overwritten.
            partial: [T, hidden], this rank's term of a sum over "attn_tp" (the shared expert's),
                which is added to the result; may be overwritten.
        """
        ...


class ExpertRows(Protocol):
    """Exchange of tokens with the ranks of their experts in fixed shapes, so it can be captured.

    Each rank has S rows. Its tokens are the first of them, the other rows are empty. Each
    ``dispatch`` is followed by one ``combine`` before the next ``dispatch``.

    Attributes:
        rows: the largest S.
        formats: input formats of experts in which ``dispatch`` can send quantised tokens.
    """

    rows: int
    formats: frozenset[str]

    def dispatch(
        self, x: Tensor | Quantized, ids: Tensor, weights: Tensor, rows: int, held: int, within: int
    ) -> tuple[Tensor | Quantized, Tensor, Tensor]:
        """Send each token to the ranks that hold one of its experts.

        Args:
            x: this rank's tokens, [T, hidden].
            ids: chosen experts, int [T, K].
            weights: float32 [T, K].
            rows: S, equal on all ranks.
            held: number of experts in a share; ranks hold the shares in order of rank.
            within: number of neighbouring ranks that hold parts of the same share.

        Returns:
            x, ids and weights of S rows a rank, in order of rank; ids count within this rank's
            share, -1 for experts of other ranks. Rows without an expert on this rank hold anything.
        """
        ...

    def combine(
        self,
        y: Tensor,
        local: Tensor,
        ids: Tensor,
        held: int,
        within: int,
        beside: Tensor | None = None,
        exact: bool = False,
    ) -> Tensor:
        """Return the sums over the ranks of the results of this rank's tokens, [S, hidden].

        Rows after the tokens are zeros.

        Args:
            y: results of this rank's experts for the rows of ``dispatch``.
            local: ids that ``dispatch`` returned.
            ids: ids, ``held`` and ``within`` as given to ``dispatch``.
            held: see ``ids``.
            within: see ``ids``.
            beside: [T, hidden], added to the sums in float32.
            exact: return float32 sums instead of sums in y's dtype.
        """
        ...


class RequestRouter(Protocol):
    """The assignment of requests to groups of ranks.

    The ranks of a group share a scheduler's decisions and hold the same pages.

    Attributes:
        group: number of this rank's group.
        leads: True: this rank reports its group's outputs to the front.
        shares: True: the groups' caches share prefixes. The rank's builder sets it.
    """

    group: int
    leads: bool
    shares: bool

    def owns(self, sequence: Sequence) -> bool:
        """Return whether this rank's group runs ``sequence``.

        The method is called once for each Submit, on every rank, in the same order. Every rank must
        make the same assignment, so the decision may use only data that all ranks have (the loads
        of ``agree``). The method may set ``sequence.expected_cached``.
        """
        ...

    def forget_prefixes(self) -> None:
        """Forget which prefixes the groups have, because their caches were emptied."""
        ...


class ParallelStrategy(Protocol):
    """One way to share the work among ranks.

    ``core/protocols/parallel_stack.py`` composes several.

    A further method is optional. ``held_experts(name, experts) -> Sequence[int] | None`` returns
    the numbers of the experts that this rank holds of an MoE layer, if these are not the range of
    ``shard("experts", ...)``; None: they are. ``name`` is the module path of the layer, and
    ``experts`` the number of its experts. Every rank holds equally many and none twice, and several
    ranks may hold the same expert. The strategy's ``expert_exchange`` sends tokens accordingly: its
    local expert numbers are indices in this list.

    Attributes:
        moves_tokens: True: ``leave_attention`` and ``enter_attention`` change the tokens.
    """

    moves_tokens: bool

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard | None:
        """Return this rank's part of a dimension; None leaves it to the strategies before this one.

        Args:
            role: "column" (outputs), "row" (inputs), "vocab", "heads", "experts", "expert_width" or
                "replicated". Special cases, after None for which the strategy is called with the
                general role: "shared_column" and "shared_row" of a shared expert, and "heads_row"
                (inputs of attention's output projection).
            name: module path of the layer.
            full: size of the dimension.
            block: the dimension may be split only at multiples of this number (128 for block FP8).
        """
        ...

    def agree(self, local: StepShape) -> StepShape:
        """Return the step shape that all ranks agree on.

        This is the one host collective of a step. If the ranks' steps cannot differ, no collective
        runs and ``local`` is returned. A rank without work passes an IDLE shape.
        """
        ...

    def router(self) -> RequestRouter | None:
        """Return the router of requests among groups of ranks, the same object in each call.

        None: every rank runs all requests, and rank 0 reports the outputs.
        """
        ...

    def enter_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """Return this rank's attention tokens; called after an MLP.

        Args:
            x: the tokens that MLPs compute, [T', hidden].
            batch: the step.

        Returns:
            [T, hidden].
        """
        ...

    def leave_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the tokens that MLPs compute; called before an MLP, on normed activations.

        Args:
            x: this rank's attention tokens, [T, hidden].
            batch: the step.

        Returns:
            [T', hidden].
        """
        ...

    def expert_exchange(self, name: str, experts: int) -> ExpertExchange | None:
        """Return the exchange of an MoE layer; None: its tokens need not move.

        With an exchange, the layer receives only this rank's attention tokens, and its shared
        expert's "shared_column" and "shared_row" are split over "attn_tp" at most.

        Args:
            name: module path of the layer.
            experts: number of its experts.
        """
        ...


class Collectives(Protocol):
    """Collectives over one mesh axis: among the ranks that differ in this axis only.

    Over an axis of size one they return their input.

    Four further methods are optional. ``check() -> None`` raises a CollectiveError after a failure
    that only the device has noticed. ``reduced_norm(input_format, add_norm)`` returns a function
    (terms, axis, residual, weight, eps) -> (normed, sum). This function sums ``PartialSum.terms``
    over the ranks, adds the residual and norms the sum. ``add_norm`` is the variant of
    ``Ops.add_rms_norm`` whose results have the format ``input_format``. With ``reduced_norm``,
    layers pass ``PartialSum`` to norms. ``reduce_scatter_exact(x, axis)`` sums x [size, N, ...] in
    float32, in order of rank, and returns this rank's part, float32 [N, ...]. ``expert_rows(axis,
    hidden, topk, rows, dtype)`` returns an ``ExpertRows`` for up to ``rows`` tokens a rank, or None
    without access to peers' memory; all ranks of the axis call the method together.

    The attribute ``replaced: str`` is optional: the reason why another backend does all exchanges
    on this machine, "" for none.

    Raises:
        CollectiveError: a peer has ended or does not answer within ``collectives.timeout``.
    """

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        """Return the sum over the axis, bitwise the same on each of its ranks.

        The sum may be computed in place. On the CPU a row's bits do not depend on the rows around
        it.
        """
        ...

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        """Concatenate x of every rank of the axis along ``dim``, in rank order.

        All ranks pass the same shape.
        """
        ...

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """Sum x [size * N, ...] over the axis and return this rank's N rows."""
        ...

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        """Send part i of x [size, N, ...] to rank i of the axis.

        Returns:
            [size, N, ...]; part i came from rank i.
        """
        ...

    def all_to_all_rows(self, x: Tensor, counts: Seq[int], received: Seq[int], axis: str) -> Tensor:
        """Send different numbers of rows to each rank of the axis.

        The counts are on the host, so this is never captured.

        Args:
            x: [sum(counts), ...], the rows for rank 0, then those for rank 1, and so on.
            counts: number of rows to send to each rank.
            received: number of rows to receive from each rank.

        Returns:
            [sum(received), ...], in rank order.
        """
        ...

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank; a host collective."""
        ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes on every rank, by rank; a host collective for rare use."""
        ...

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Gather numbers of every rank on every rank.

        This is one small host collective; ``agree`` uses it.

        Args:
            values: int64 [N].

        Returns:
            int64 [ranks, N], which the caller must not change: it may be read-only.
        """
        ...

    def close(self) -> None:
        """Release communicators and connections."""
        ...
