"""Calls across slots as they are made: what was called, on which tensors, and the least it has to
move and multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import (
    AttentionBackend,
    ExpertsMethod,
    ExpertsShape,
    LinearMethod,
    LinearShape,
    Ops,
    QuantizationScheme,
)
from glowplug.core.step.batch import Batch
from glowplug.entrypoints.bench.others.floor import weight_bytes

KEPT = 1 << 26  #: numbers of an output up to which a copy is kept, to compare providers by


@dataclass(frozen=True)
class Cost:
    """What a call has to move and multiply at least: ``moved`` bytes beside its arguments and
    results, ``flops``.
    """

    moved: float = 0.0
    flops: float = 0.0


Costing = Callable[[tuple[Any, ...]], Cost]


@dataclass(eq=False)
class Call:
    """One call. ``layer``: number of the cut model's layer it was made in; None: outside of them.

    ``moved`` bytes and ``flops``: the least that any provider of the call needs. ``out``: a copy of
    its first result.
    """

    slot: str
    name: str
    shape: str
    layer: int | None
    run: Callable[[], Any]
    moved: float
    flops: float
    out: Tensor | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[str, str, str, int | None]:
        return self.slot, self.name, self.shape, self.layer


class Recorder:
    """Writes down wrapped calls between ``start`` and ``stop``; an inner call of a wrapped one is
    not written down.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.layer: int | None = None
        self.batch: Batch | None = None
        self._calls: list[Call] = []
        self._inside = False

    def start(self, batch: Batch) -> None:
        self.batch = batch
        self._calls = []

    def stop(self) -> list[Call]:
        self.batch = None
        return self._calls

    def wrap(
        self,
        slot: str,
        name: str,
        function: Callable[..., Any],
        cost: Costing = lambda args: Cost(),
    ) -> Any:
        def recorded(*args: Any) -> Any:
            if self.batch is None or self._inside:
                return function(*args)
            self._inside = True
            try:
                result = function(*args)
            finally:
                self._inside = False
            self._note(slot, name, function, args, result, cost(args))
            return result

        return recorded

    def _note(
        self,
        slot: str,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        result: Any,
        cost: Cost,
    ) -> None:
        given = _tensors(args)
        made = _tensors((result,))
        apart = [
            tensor
            for tensor in made
            if all(tensor.data_ptr() != other.data_ptr() for other in given)
        ]
        moved = cost.moved + sum(_bytes(tensor) for tensor in (*given, *apart))
        first = (
            made[0].clone()
            if made and made[0].is_floating_point() and made[0].numel() <= KEPT
            else None
        )
        self._calls.append(
            Call(
                slot,
                name,
                " ".join(_shape(tensor) for tensor in given[:3]),
                self.layer,
                lambda: function(*args),
                moved,
                cost.flops,
                first,
            )
        )


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(tuple(value))
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


# ---- slots ---------------------------------------------------------------------------------------

NOT_TIMED = frozenset({"rope_table", "fused", "route"})


class RecordedOps:
    """An op table whose calls are written down."""

    def __init__(self, ops: Ops, recorder: Recorder) -> None:
        self._ops = ops
        self._recorder = recorder
        self.route = recorder.wrap("ops", "route", ops.route) if ops.route is not None else None
        signalling = getattr(ops, "route_signalling", None)
        self.route_signalling = (
            recorder.wrap("ops", "route", signalling) if signalling is not None else None
        )
        self.fused: Mapping[tuple[str, str], Callable[..., Any]] = {
            key: recorder.wrap("ops", f"{key[0]} to {key[1]}", function)
            for key, function in ops.fused.items()
        }

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return (
            self._recorder.wrap("ops", name, found)
            if callable(found) and name not in NOT_TIMED
            else found
        )


class RecordedAttention:
    """A backend whose calls by layers are written down."""

    def __init__(self, backend: AttentionBackend, recorder: Recorder) -> None:
        self._backend = backend
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in ("mla", "mla_projected", "mha") or found is None:
            return found
        return self._recorder.wrap("attention", name, found, self._cost)

    def _cost(self, args: tuple[Any, ...]) -> Cost:
        layer = args[-1]
        batch = self._recorder.batch
        plan = self._recorder.plan
        assert batch is not None
        cached = sum(entry.token_bytes for entry in self._backend.kv_layout().entries) * int(
            batch.kv_lens.sum()
        )
        pairs = float(
            (batch.query_lens.astype(float) * (batch.kv_lens - (batch.query_lens - 1) / 2)).sum()
        )
        if plan.facts.model.kind != "mla":
            return Cost(cached, 4 * pairs * layer.heads * layer.head_dim)
        up = layer.lora_rank * (layer.nope_dim + layer.v_dim)
        numbers = 2 * layer.lora_rank + layer.rope_dim
        if not batch.num_decodes:  # keys and values are expanded
            numbers = layer.nope_dim + layer.rope_dim + layer.v_dim
        products = 2 * layer.heads * (pairs * numbers + batch.num_tokens * up)
        return Cost(cached + layer.heads * up * DTYPE_BYTES[plan.dtype], products)


class RecordedScheme:
    """A quantization scheme whose methods' products are written down. ``quantized``: the
    checkpoint's weights are.
    """

    def __init__(self, scheme: QuantizationScheme, recorder: Recorder, quantized: bool) -> None:
        self._scheme = scheme
        self._recorder = recorder
        model = recorder.plan.facts.model
        element = DTYPE_BYTES[recorder.plan.dtype]
        self._width = weight_bytes(model, element) if quantized else element

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheme, name)

    def linear(self, shape: LinearShape) -> LinearMethod:
        method: Any = self._scheme.linear(shape)
        numbers = sum(shape.outputs) * shape.inputs

        def cost(args: tuple[Any, ...]) -> Cost:
            return Cost(numbers * self._width, 2.0 * _rows(args[0]) * numbers)

        method.apply = self._recorder.wrap("linear", _role(shape.name), method.apply, cost)
        return method  # type: ignore[no-any-return]

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        method: Any = self._scheme.experts(shape)
        one = 3 * shape.hidden * shape.inter

        def cost(args: tuple[Any, ...]) -> Cost:
            ids = args[1]
            distinct = int(torch.unique(ids[ids >= 0]).numel())
            return Cost(distinct * one * self._width, 2.0 * ids.numel() * one)

        method.apply = self._recorder.wrap("experts", "experts", method.apply, cost)
        return method  # type: ignore[no-any-return]


def _rows(x: Any) -> int:
    return int((x if isinstance(x, Tensor) else x[0]).shape[0])


def _role(name: str) -> str:
    """The module's path without the layer it is in."""
    parts = name.split(".")
    return ".".join(parts[3:]) if parts[:2] == ["model", "layers"] and len(parts) > 3 else name
