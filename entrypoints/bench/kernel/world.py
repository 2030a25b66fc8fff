"""One recorded decode or prefill step of a model that is cut to one layer of each kind.

The recorded calls are those that layers make to the components of the slots: ops, linear and expert
methods, attention, sampling. So everything that a plugin of these slots offers is measured, with
the fusions that the model really uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.layers.decoder import DecoderLayer
from glowplug.core.layers.gate import Gate
from glowplug.core.layers.module import Module
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Limits, WeightTarget
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.startup.components import build_component
from glowplug.core.startup.load_weights import load_model
from glowplug.core.startup.lone_rank import lone_context
from glowplug.core.step.batch import Batch, shape_of
from glowplug.core.step.kv_pool import KVPool
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.bench.kernel.calls import (
    Call,
    CallRecorder,
    RecordedAttention,
    RecordedOps,
    RecordedScheme,
)

FP8_BLOCK = 128


@dataclass(frozen=True)
class KernelStepShape:
    """The shape of a step: ``rows`` sequences of ``context`` tokens each.

    The step computes the last ``queries`` tokens of each sequence.
    """

    rows: int
    context: int
    queries: int = 1

    @property
    def name(self) -> str:
        if self.queries == 1:
            return f"decode {self.rows} x {self.context}"
        return f"prefill {self.rows} x {self.queries}"


class NoiseSource:
    """``WeightSource`` that returns slices of one random buffer on the device.

    Reusing the buffer fills billions of weights within seconds.
    """

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        self._noise = torch.empty(0)

    def open(self, facts: ModelFacts) -> None:
        self._noise = torch.empty(0)

    def entries(self) -> dict[str, Any]:
        return {}

    def read(self, target: WeightTarget) -> Tensor:
        count = int(np.prod(target.shape))
        if self._noise.numel() < count:
            self._noise = torch.randn(count, generator=self._generator, device=self._device)
        value = self._noise[:count].view(target.shape)
        if target.name.endswith("_scale_inv"):
            value = torch.full_like(value, (target.shape[-1] * FP8_BLOCK) ** -0.5 / 96)
        elif target.dtype == "float8_e4m3fn":
            value = (value * 96).clamp(-448, 448).to(torch.float8_e4m3fn)
        elif len(target.shape) == 1:
            value = (
                (1 + 0.1 * value).to(self._dtype)
                if target.name.endswith("weight")
                else 0.05 * value
            )
        else:
            value = (value * target.shape[-1] ** -0.5).to(self._dtype)
        return value[target.index]

    def close(self) -> None:
        return


class KernelWorld:
    """The components of one rank, built around a cut model; further ranks are not started.

    ``calls(shape)`` runs one step and returns the recorded calls to these components.
    """

    def __init__(self, plan: EnginePlan, plugins: PluginSet) -> None:
        self.plan = plan
        self.recorder = CallRecorder(plan)
        plain = lone_context(plan, plugins)
        self.worker = plain.worker
        self.context = _with_recorders(plain, self.recorder)
        family = build_component(plugins, plan.choice("model"), plan, self.worker)
        self.model: Any = family.build(self.context)
        source = NoiseSource(self.worker.device, self.worker.dtype, plan.seed)
        load_model(self.model, source, plan.facts.model)
        _record_layers(self.model, self.recorder)
        self.sampler = build_component(plugins, plan.choice("sampling"), plan, self.worker)
        self.pool = KVPool(plain.attention.kv_layout(), plan.sizes.num_pages, self.worker.device)
        self.attention = plain.attention
        sizes = plan.sizes
        model = plan.facts.model
        limits = Limits(
            rows=sizes.max_running + 1,
            context=sizes.positions,
            num_pages=sizes.num_pages,
            width=1,
            vocab=model.vocab_size,
            kv=self.pool.layers,
            hidden=model.hidden_size,
        )
        for part in (self.attention, self.sampler):
            part.reserve(limits)

    def calls(self, shape: KernelStepShape) -> list[Call]:
        """Return every recorded call of one step, in order, after a warm-up step."""
        batch = step_batch(self.plan, self.worker.device, shape)
        self._fill_cache(batch)
        ones = np.ones(1, np.int32)
        for row in range(shape.rows):
            self.sampler.join(row, SamplingParams(temperature=0.0), ones, 1, frozenset())
        with torch.inference_mode():
            self._step(batch)
            self.recorder.start(batch)
            self._step(batch)
        for row in range(shape.rows):
            self.sampler.leave(row)
        return self.recorder.stop()

    def _step(self, batch: Batch) -> None:
        """Run one step of the cut model, up to the sampled tokens."""
        self.recorder.layer = None
        self.sampler.plan_step(batch)
        self.attention.plan_step(batch, None)
        hidden = self.model.forward(batch.input_ids, batch.positions, batch)
        logits = self.model.logits(
            hidden if batch.logits_index is None else hidden[batch.logits_index]
        )
        sample = self.recorder.wrap("sampling", "sample", self.sampler.sample)
        sample(logits, batch.row_ids, batch.kv_lens_device.long())

    def _fill_cache(self, batch: Batch) -> None:
        """Fill the KV cache with random numbers, which are the same for every KV layout.

        Each token has one row of numbers, which is split over the tensors of the layout.
        """
        page = self.plan.sizes.page_size
        for layer in self.pool.layers:
            tensors = list(layer.values())
            width = sum(tensor[0].numel() for tensor in tensors)
            noise = torch.randn(
                int(batch.kv_lens.max()),
                width,
                device=self.worker.device,
                generator=torch.Generator(self.worker.device).manual_seed(1),
            )
            for pages, length in zip(batch.pages, batch.kv_lens):
                first = int(pages[0]) * page
                column = 0
                for tensor in tensors:
                    count = tensor[0].numel()
                    tensor[first : first + length] = (
                        noise[:length, column : column + count]
                        .reshape(length, *tensor.shape[1:])
                        .to(tensor.dtype)
                    )
                    column += count


def step_batch(plan: EnginePlan, device: str, shape: KernelStepShape) -> Batch:
    """Return a batch of the given shape, in which each row has consecutive pages."""
    page = plan.sizes.page_size
    pages_per_row = -(-shape.context // page)
    pages = np.arange(1, shape.rows * pages_per_row + 1, dtype=np.int32).reshape(
        shape.rows, pages_per_row
    )
    decodes = shape.rows if shape.queries == 1 else 0
    batch = Batch(
        step=1,
        mode=Mode.DECODE if decodes else Mode.PREFILL,
        rows=np.arange(shape.rows, dtype=np.int32),
        epochs=np.zeros(shape.rows, np.int64),
        num_decodes=decodes,
        query_lens=np.full(shape.rows, shape.queries, np.int32),
        kv_lens=np.full(shape.rows, shape.context, np.int32),
        samples=np.ones(shape.rows, np.bool_),
        prompt_ids=np.zeros(0, np.int32),
        pages=pages,
    )
    positions = torch.arange(shape.context - shape.queries, shape.context).repeat(shape.rows)
    rows = torch.arange(shape.rows).repeat_interleave(shape.queries)
    kv_slots = torch.from_numpy(pages[:, 0].astype(np.int64))[rows] * page + positions
    starts = torch.arange(shape.rows + 1, dtype=torch.int32) * shape.queries
    generator = torch.Generator().manual_seed(plan.seed)
    ids = torch.randint(plan.facts.model.vocab_size, (len(positions),), generator=generator)
    batch.input_ids = ids.to(device)
    batch.positions = positions.to(device)
    batch.kv_slots = kv_slots.to(device)
    batch.row_ids = torch.arange(shape.rows, device=device)
    batch.kv_lens_device = torch.from_numpy(batch.kv_lens).to(device)
    batch.query_starts = starts.to(device)
    batch.page_table = torch.from_numpy(pages).to(device)
    batch.logits_index = None if decodes else (starts[1:].long() - 1).to(device)
    batch.agreed = shape_of(batch)
    return batch


def _with_recorders(context: BuildContext, recorder: CallRecorder) -> BuildContext:
    """Return ``context`` with recording wrappers around its scheme, attention and ops."""
    quantized = context.facts.quant_method != "none"
    plain: Any = RecordedScheme(context.plain, recorder, False)
    scheme: Any = (
        plain
        if context.scheme is context.plain
        else RecordedScheme(context.scheme, recorder, quantized)
    )
    attention: Any = RecordedAttention(context.attention, recorder)
    ops: Any = RecordedOps(context.ops, recorder)
    return replace(context, scheme=scheme, plain=plain, attention=attention, ops=ops)


def _record_layers(module: Module, recorder: CallRecorder) -> None:
    """Wrap the MoE gates and the layers in ``module`` for the recorder.

    The gates' calls are then recorded, and each recorded call has the number of its layer.
    """
    for child in module.children():
        if isinstance(child, Gate):
            child.forward = recorder.wrap("ops", "gate", child.forward)  # type: ignore[method-assign]
        if isinstance(child, DecoderLayer):
            child.forward = _tracked_forward(child, recorder)  # type: ignore[method-assign]
        _record_layers(child, recorder)


def _tracked_forward(layer: DecoderLayer, recorder: CallRecorder) -> Callable[..., Any]:
    """Return a wrapper of the layer's ``forward`` that sets ``recorder.layer`` while it runs."""
    original = layer.forward
    number = layer.attention.index

    def forward(*args: Any) -> Any:
        recorder.layer = number
        try:
            return original(*args)
        finally:
            recorder.layer = None

    return forward
