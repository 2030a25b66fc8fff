"""Recording of the calls that a step makes to the components of slots, to time them later."""

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

#: most elements of an output that is copied to compare providers
COPIED_ELEMENTS_MAX = 1 << 26


@dataclass(frozen=True)
class Cost:
    """The least memory traffic and computation that a kernel call needs.

    Attributes:
        moved: bytes to read or write besides the call's arguments and results.
        flops: floating-point operations.
    """

    moved: float = 0.0
    flops: float = 0.0


Costing = Callable[[tuple[Any, ...]], Cost]


@dataclass(eq=False)
class Call:
    """One recorded call of a component's kernel.

    Attributes:
        slot: slot whose component is called.
        name: name of the kernel in the tables.
        shape: shapes of the first three tensor arguments.
        layer: index of the cut model's layer that made the call; None: outside of the layers.
        run: repeats the call.
        moved: fewest bytes that any provider has to move.
        flops: fewest floating-point operations that any provider needs.
        out: copy of the first result, for comparison; None if it is too large or not floating
            point.
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


class CallRecorder:
    """Records wrapped calls between ``start`` and ``stop``.

    A wrapped call that runs inside another wrapped call is not recorded.
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
        """Return ``function`` with its calls recorded.

        Args:
            slot: slot whose component is called.
            name: name of the kernel in the tables.
            function: the function to record.
            cost: returns the least cost of a call, from its arguments.
        """

        def recorded(*args: Any) -> Any:
            if self.batch is None or self._inside:
                return function(*args)
            self._inside = True
            try:
                result = function(*args)
            finally:
                self._inside = False
            self._record_call(slot, name, function, args, result, cost(args))
            return result

        return recorded

    def _record_call(
        self,
        slot: str,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        result: Any,
        cost: Cost,
    ) -> None:
        """Record a call with the least bytes it has to move and operations it has to compute."""
        inputs = _tensors(args)
        outputs = _tensors((result,))
        new = [
            tensor
            for tensor in outputs
            if all(tensor.data_ptr() != other.data_ptr() for other in inputs)
        ]
        moved = cost.moved + sum(_bytes(tensor) for tensor in (*inputs, *new))
        first = (
            outputs[0].clone()
            if outputs
            and outputs[0].is_floating_point()
            and outputs[0].numel() <= COPIED_ELEMENTS_MAX
            else None
        )
        self._calls.append(
            Call(
                slot,
                name,
                " ".join(_shape(tensor) for tensor in inputs[:3]),
                self.layer,
                lambda: function(*args),
                moved,
                cost.flops,
                first,
            )
        )


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    """Return all tensors among ``values``, those in nested lists and tuples included."""
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
    """An op table whose calls are recorded."""

    def __init__(self, ops: Ops, recorder: CallRecorder) -> None:
        self._ops = ops
        self._recorder = recorder
        self.route = recorder.wrap("ops", "route", ops.route) if ops.route is not None else None
        route_and_set_ready = getattr(ops, "route_and_set_ready", None)
        self.route_and_set_ready = (
            recorder.wrap("ops", "route", route_and_set_ready)
            if route_and_set_ready is not None
            else None
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
    """An attention backend whose calls from layers are recorded."""

    def __init__(self, backend: AttentionBackend, recorder: CallRecorder) -> None:
        self._backend = backend
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in ("mla", "mla_projected", "mha") or found is None:
            return found
        return self._recorder.wrap("attention", name, found, self._cost)

    def _token_bytes(self) -> int:
        """Return the number of bytes that one token takes in the KV cache of one layer."""
        return sum(entry.token_bytes for entry in self._backend.kv_layout().entries)

    def _cost(self, args: tuple[Any, ...]) -> Cost:
        """Return the least cost of an attention call.

        The bytes are those read from the KV cache and, for MLA, from the up-projection's weights.
        """
        layer = args[-1]
        batch = self._recorder.batch
        plan = self._recorder.plan
        assert batch is not None
        cached = int(batch.kv_lens.sum()) * self._token_bytes()
        pairs = float(
            (batch.query_lens.astype(float) * (batch.kv_lens - (batch.query_lens - 1) / 2)).sum()
        )
        if plan.facts.model.kind != "mla":
            return Cost(cached, 4 * pairs * layer.heads * layer.head_dim)
        up = layer.lora_rank * (layer.nope_dim + layer.v_dim)
        numbers = 2 * layer.lora_rank + layer.rope_dim
        if not batch.num_decodes:  # prefill expands keys and values
            numbers = layer.nope_dim + layer.rope_dim + layer.v_dim
        flops = 2 * layer.heads * (pairs * numbers + batch.num_tokens * up)
        return Cost(cached + layer.heads * up * DTYPE_BYTES[plan.dtype], flops)


class RecordedScheme:
    """A quantization scheme whose linear and expert GEMMs are recorded.

    Args:
        quantized: True if the scheme's weights are quantized in the checkpoint.
    """

    def __init__(self, scheme: QuantizationScheme, recorder: CallRecorder, quantized: bool) -> None:
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
            held = ids[ids >= 0]  # the others are experts of other ranks
            distinct = int(torch.unique(held).numel())
            return Cost(distinct * one * self._width, 2.0 * held.numel() * one)

        method.apply = self._recorder.wrap("experts", "experts", method.apply, cost)
        return method  # type: ignore[no-any-return]


def _rows(x: Any) -> int:
    return int((x if isinstance(x, Tensor) else x[0]).shape[0])


def _role(name: str) -> str:
    """Return a module's path within its layer, which is the same in every layer."""
    parts = name.split(".")
    return ".".join(parts[3:]) if parts[:2] == ["model", "layers"] and len(parts) > 3 else name
