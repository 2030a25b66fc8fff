"""Exchanges between ranks that are checked and timed, each through what a model's layers call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.facts.mesh import AXES, group
from glowplug.core.layers.linear import FORMAT_PLAIN, Linear, Part, produced_format
from glowplug.core.layers.norm import RmsNorm
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PartialSum
from glowplug.core.protocols.build_context import BuildContext
from glowplug.entrypoints.bench.ranks.exchange_times import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
)

ADD_NORM = "all_reduce + add + norm"
READER = "model.layers.0.mlp.gate_proj"  #: layer whose input format a quantising norm writes
READER_ROWS = 128  #: one quantisation block
NORM_ROWS_MAX = 512  #: most tokens of a measured norm
EPS = 1e-6  #: epsilon of the measured norms
FP8_ERROR = 0.125  #: largest difference of two E4M3 numbers that were rounded differently


@dataclass(frozen=True)
class Operation:
    """One exchange between ranks.

    Attributes:
        name: name in the tables.
        axis: mesh axis of the exchange.
        ranks: number of ranks that take part.
        bytes: bytes of the whole tensor; of all tokens of a rank for the expert exchange.
        tokens: tokens of each rank; 0 for tensors that are not tokens.
        traffic: bytes that each rank has to send and receive, for the bus bandwidth; 0 if they
            depend on the routing.
        tolerance: largest relative error of a correct result.
        error: function that makes the call on random numbers and returns the largest difference
            from a float32 reference, relative to the reference's largest number.
        run: function that makes the call on zeros, as often as wanted.
    """

    name: str
    axis: str
    ranks: int
    bytes: int
    tokens: int
    traffic: float
    tolerance: float
    error: Callable[[], float]
    run: Callable[[], object]


def axes_of(plan: EnginePlan, rank: int) -> list[str]:
    """Return the mesh axes of several ranks, one of those that connect the same ranks."""
    found: dict[tuple[int, ...], str] = {}
    for axis in AXES:
        members = group(axis, rank, plan.mesh)
        if len(members) > 1:
            found.setdefault(members, axis)
    return list(found.values())


class SumsAndGathers:
    """The all-reduces, gathers and norms of one mesh axis.

    Args:
        context: the rank's components.
        plan: the plan.
        axis: the mesh axis.
    """

    def __init__(self, context: BuildContext, plan: EnginePlan, axis: str) -> None:
        self._context = context
        self._axis = axis
        self._seed = plan.seed
        self._hidden = plan.facts.model.hidden_size
        self._members = group(axis, context.worker.rank, plan.mesh)
        self._own = self._members.index(context.worker.rank)
        self._ranks = len(self._members)
        self._eps = float(torch.finfo(context.dtype).eps)
        self._width = context.dtype.itemsize

    def operations(self, sizes: Iterable[int]) -> Iterator[Operation]:
        """Yield every operation for tensors of ``sizes`` bytes; norms for whole tokens."""
        wanted = sorted(sizes)
        counts = dict.fromkeys(
            max(1, size // self._width // self._ranks) * self._ranks for size in wanted
        )
        for count in counts:
            yield self._all_reduce(count)
        for count in counts:
            yield self._all_gather(count)
        for count in counts:
            yield self._reduce_scatter(count)
        most = max(wanted) // (self._hidden * self._width)
        rows = [1 << power for power in range(NORM_ROWS_MAX.bit_length()) if 1 << power <= most]
        for label, norm in self._norms():
            for tokens in rows or [1]:
                yield self._add_norm(label, norm, tokens)

    def _terms(self, *shape: int) -> list[Tensor]:
        """Return the random numbers of every rank of the axis, which are equal on all ranks."""
        context = self._context
        return [random_numbers(context, self._seed + rank, *shape) for rank in self._members]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=self._context.dtype, device=self._context.worker.device)

    def _operation(
        self,
        name: str,
        shape: Sequence[int],
        traffic: float,
        call: Callable[[Tensor], Tensor],
        wanted: Callable[[list[Tensor]], Tensor],
        exact: bool = False,
    ) -> Operation:
        """Return the operation that calls ``call`` with a tensor of ``shape`` on every rank.

        Args:
            traffic: bytes that each rank has to send, per byte of the whole tensor.
            wanted: function of the ranks' terms that returns the result in float32.
            exact: True: the result must be equal bit by bit.
        """
        zeros = self._zeros(*shape)
        whole = zeros.numel() * self._width * (self._ranks if name == ALL_GATHER else 1)

        def error() -> float:
            terms = self._terms(*shape)
            return difference(call(terms[self._own].clone()), wanted(terms))

        return Operation(
            name,
            self._axis,
            self._ranks,
            whole,
            0,
            whole * traffic,
            0.0 if exact else self._ranks * self._eps,
            error,
            lambda: call(zeros),
        )

    def _all_reduce(self, count: int) -> Operation:
        return self._operation(
            ALL_REDUCE,
            (count,),
            2 * (self._ranks - 1) / self._ranks,
            lambda x: self._context.collectives.all_reduce(x, self._axis),
            summed,
        )

    def _all_gather(self, count: int) -> Operation:
        return self._operation(
            ALL_GATHER,
            (1, count // self._ranks),
            (self._ranks - 1) / self._ranks,
            lambda x: self._context.collectives.all_gather(x, self._axis),
            torch.cat,
            exact=True,
        )

    def _reduce_scatter(self, count: int) -> Operation:
        return self._operation(
            REDUCE_SCATTER,
            (self._ranks, count // self._ranks),
            (self._ranks - 1) / self._ranks,
            lambda x: self._context.collectives.reduce_scatter(x, self._axis),
            lambda terms: summed(terms)[self._own : self._own + 1],
        )

    def _norms(self) -> Iterator[tuple[str, RmsNorm]]:
        """Yield the name of each format of a norm's results, and the norm."""
        context = self._context
        yield ADD_NORM, RmsNorm(context, "norm", self._hidden, EPS)
        reader = Linear(context, READER, self._hidden, [Part(READER, READER_ROWS, "replicated")])
        if produced_format(context.ops, "add_rms_norm", reader) != FORMAT_PLAIN:
            name = f"{ADD_NORM} ({reader.input_format})"
            yield name, RmsNorm(context, "norm", self._hidden, EPS, reader)

    def _add_norm(self, name: str, norm: RmsNorm, tokens: int) -> Operation:
        """Return the sum over the ranks with residual and norm, as a layer's norm computes it."""
        shape = tokens, self._hidden
        zeros = self._zeros(*shape)
        residual = random_numbers(self._context, self._seed - 1, *shape)
        summed_norm = SummedNorm(self._context, norm, self._axis, residual)
        size = zeros.numel() * self._width
        return Operation(
            name,
            self._axis,
            self._ranks,
            size,
            tokens,
            size * 2 * (self._ranks - 1) / self._ranks,
            FP8_ERROR if summed_norm.quantised else (self._ranks + 2) * self._eps,
            lambda: summed_norm.error(self._terms(*shape), self._own),
            lambda: summed_norm.of(zeros),
        )


class SummedNorm:
    """The norm of a sum over the ranks and a residual.

    Args:
        context: the rank's components.
        norm: the norm.
        axis: mesh axis of the sum.
        residual: [T, hidden].
    """

    def __init__(self, context: BuildContext, norm: RmsNorm, axis: str, residual: Tensor) -> None:
        self._context = context
        self._norm = norm
        self._axis = axis
        self._residual = residual

    @property
    def quantised(self) -> bool:
        """True: the norm's results are numbers of 8 bits."""
        result = self._norm.add(torch.zeros_like(self._residual), self._residual)
        return any(one.dtype.itemsize == 1 for one in tensors_of(result))

    def of(self, x: Tensor) -> tuple[Any, Tensor]:
        """Return (norm, sum) of this rank's x [T, hidden], which may be overwritten."""
        if self._context.sums_in_norm:
            return self._norm.add(PartialSum(x, self._axis), self._residual)
        return self._norm.add(self._context.collectives.all_reduce(x, self._axis), self._residual)

    def error(self, terms: list[Tensor], own: int) -> float:
        """Return the largest difference from the norm of the float32 sum of ``terms``.

        ``own``: index of this rank's term.
        """
        wanted = self._norm.add(summed(terms).to(self._residual.dtype), self._residual)
        pairs = zip(tensors_of(self.of(terms[own].clone())), tensors_of(wanted), strict=True)
        return max(difference(one, other) for one, other in pairs)


def random_numbers(context: BuildContext, seed: int, *shape: int) -> Tensor:
    """Return random numbers in the compute dtype that are the same wherever they are made."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(context.worker.device, context.dtype)


def summed(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of the ranks' terms in float32, in order of rank."""
    total = torch.zeros_like(terms[0], dtype=torch.float32)
    for term in terms:
        total += term.float()
    return total


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest number of ``wanted``.

    The result is infinite where the shapes differ or a number is not finite.
    """
    if found.shape != wanted.shape:
        return float("inf")
    apart = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    value = float(apart)
    return value if np.isfinite(value) else float("inf")


def tensors_of(result: Any) -> list[Tensor]:
    """Return all tensors of a result, those in nested tuples included."""
    if isinstance(result, Tensor):
        return [result]
    return [one for part in result or () for one in tensors_of(part)]
