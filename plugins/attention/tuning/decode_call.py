"""One attention backend with a decode step of its own, to be called and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import AttentionBackend, Limits, Worker
from glowplug.core.step.batch import Batch, shape_of
from glowplug.core.step.kv_pool import KVPool
from glowplug.plugins.attention.shared.attention_tables import AttentionProblem

COLD_BYTES = 128 << 20  #: bytes of caches read in turn, more than the device's cache holds
LAYERS_MAX = 16  #: most layers whose caches are read in turn

Build = Callable[[EnginePlan], AttentionBackend]


@dataclass
class _Layer:
    """The sizes and weights of a layer, as ``MlaLayer`` and ``MhaLayer`` state them."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    nope_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    lora_rank: int = 0
    w_uk: Tensor | None = None
    w_uv: Tensor | None = None
    w_kv: Tensor | None = None
    kv_stored: None = None


@dataclass(frozen=True)
class DecodeStep:
    """The step of which a backend's attention is timed.

    Attributes:
        problem: heads, sizes and dtypes.
        rows: rows of the step.
        context: keys of each row.
    """

    problem: AttentionProblem
    rows: int
    context: int


class DecodeCalls:
    """Calls of a backend's decode attention: one for each of several layers with own caches.

    A call stores the step's keys, attends, and for latent attention also multiplies by W_UK and
    W_UV, so that fusions of a backend count.

    Args:
        build: makes the backend of a plan.
        plan: the plan of the model.
        step: the step.
        worker: the device.
    """

    def __init__(self, build: Build, plan: EnginePlan, step: DecodeStep, worker: Worker) -> None:
        problem, rows, context = step.problem, step.rows, step.context
        pages = 1 + rows * -(-context // plan.sizes.page_size)
        sizes = replace(plan.sizes, context_length=context, max_running=rows, num_pages=pages)
        self._plan = replace(plan, sizes=sizes)
        self._problem = problem
        self._device = worker.device
        self._dtype: torch.dtype = worker.dtype
        self.backend = build(self._plan)
        pool = _filled_pool(self.backend, pages, worker.device)
        self.backend.reserve(_limits(self._plan, step, pool))
        self._batch = decode_batch(self._plan, problem.width, rows, context, worker.device)
        self._layers = [self._layer(index) for index in range(len(pool.layers))]
        self._inputs = self._random_inputs(rows * problem.width)

    def _layer(self, index: int) -> _Layer:
        """Return layer ``index`` with random weights."""
        problem = self._problem
        model = self._plan.facts.model
        layer = _Layer(index, problem.heads, problem.kv_heads, problem.dim, 1 / problem.dim**0.5)
        if problem.kind == "mla":
            layer.lora_rank = model.kv_lora_rank
            layer.rope_dim = model.qk_rope_head_dim
            layer.nope_dim = int(model.config["qk_nope_head_dim"])
            layer.v_dim = int(model.config["v_head_dim"])
            shape = (problem.heads, layer.nope_dim + layer.v_dim, layer.lora_rank)
            layer.w_kv = self._random(*shape) * layer.lora_rank**-0.5
            layer.w_uk = layer.w_kv[:, : layer.nope_dim]
            layer.w_uv = layer.w_kv[:, layer.nope_dim :].transpose(1, 2)
        return layer

    def _random_inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Return the tensors of ``tokens`` tokens that ``mla`` or ``mha`` takes."""
        problem, layer = self._problem, self._layers[0]
        if problem.kind == "mla":
            return (
                self._random(tokens, problem.heads, layer.nope_dim),
                self._random(tokens, problem.heads, layer.rope_dim),
                self._random(tokens, layer.lora_rank),
                self._random(tokens, layer.rope_dim),
            )
        return (
            self._random(tokens, problem.heads, problem.dim),
            self._random(tokens, problem.kv_heads, problem.dim),
            self._random(tokens, problem.kv_heads, problem.dim),
        )

    def _random(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(self._device, self._dtype)

    def calls(self) -> list[Callable[[], Tensor]]:
        """Plan the step, and return a call for each layer."""
        with torch.inference_mode():
            self.backend.plan_step(self._batch, None)
        return [self._call_of(layer) for layer in self._layers]

    def _call_of(self, layer: Any) -> Callable[[], Tensor]:
        attend: Any = self.backend.mla if self._problem.kind == "mla" else self.backend.mha

        def call() -> Tensor:
            with torch.inference_mode():
                result: Tensor = attend(*self._inputs, layer)
            return result

        return call

    def result(self) -> Tensor:
        """Run the first layer and return its result, float32."""
        return self.calls()[0]().float()


def _limits(plan: EnginePlan, step: DecodeStep, pool: KVPool) -> Limits:
    """Return the bounds of a step over the caches of ``pool``."""
    return Limits(
        rows=step.rows + 1,
        context=plan.sizes.positions,
        num_pages=pool.num_pages,
        width=step.problem.width,
        vocab=plan.facts.model.vocab_size,
        kv=pool.layers,
        hidden=plan.facts.model.hidden_size,
    )


def layers_in_turn(layer_bytes: int) -> int:
    """Return the number of layers whose caches are together larger than the device's cache."""
    return min(LAYERS_MAX, max(2, COLD_BYTES // max(1, layer_bytes)))


def _filled_pool(backend: AttentionBackend, pages: int, device: str) -> KVPool:
    """Return a KV pool of several layers with random contents."""
    layout = backend.kv_layout()
    one = KVPool(replace(layout, layers=1), pages, device)
    count = layers_in_turn(one.bytes) if device != "cpu" else 1
    pool = KVPool(replace(layout, layers=count), pages, device)
    for number, layer in enumerate(pool.layers):
        _fill(layer, number)
    return pool


def _fill(layer: Mapping[str, Tensor], seed: int) -> None:
    """Fill the cache of a layer with normally distributed numbers."""
    for tensor in layer.values():
        generator = torch.Generator(tensor.device).manual_seed(seed)
        for part in tensor.view(-1).split(1 << 26):
            noise = torch.randn(part.shape, generator=generator, device=tensor.device)
            part.copy_(noise.to(tensor.dtype))


def decode_batch(plan: EnginePlan, width: int, rows: int, context: int, device: str) -> Batch:
    """Return a decode step whose rows have ``context`` keys, in consecutive pages each.

    ``width``: query tokens of a row, the last ones of its keys.
    """
    page = plan.sizes.page_size
    each = -(-context // page)
    pages = np.arange(1, 1 + rows * each, dtype=np.int32).reshape(rows, each)
    positions = np.arange(context - width, context, dtype=np.int64)
    slots = pages[:, positions // page].astype(np.int64) * page + positions % page
    batch = _host_batch(width, pages, context)
    _set_device_fields(batch, np.tile(positions, rows), slots.reshape(-1), device)
    return batch


def _set_device_fields(
    batch: Batch, positions: NDArray[np.int64], slots: NDArray[np.int64], device: str
) -> None:
    """Set the device fields of ``batch``; ``positions`` and ``slots`` are those of its tokens."""
    rows = batch.num_rows
    width = len(positions) // rows
    batch.positions = torch.from_numpy(positions).to(device)
    batch.kv_slots = torch.from_numpy(slots).to(device)
    batch.kv_lens_device = torch.from_numpy(batch.kv_lens).to(device)
    batch.page_table = torch.from_numpy(batch.pages).to(device)
    batch.row_ids = torch.arange(rows, device=device)
    batch.query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * width
    batch.agreed = shape_of(batch)


def _host_batch(width: int, pages: NDArray[np.int32], context: int) -> Batch:
    """Return the step of :func:`decode_batch` without device fields.

    ``pages``: page table of its rows.
    """
    rows = len(pages)
    return Batch(
        step=1,
        mode=Mode.DECODE if width == 1 else Mode.VERIFY,
        rows=np.arange(rows, dtype=np.int32),
        epochs=np.zeros(rows, np.int64),
        num_decodes=rows,
        query_lens=np.full(rows, width, np.int32),
        kv_lens=np.full(rows, context, np.int32),
        samples=np.ones(rows, np.bool_),
        prompt_ids=np.zeros(0, np.int32),
        pages=pages,
        longest=context,
    )
