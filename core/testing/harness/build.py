"""Construction and stepping of one model on one CPU rank, around real or fake parts.

It is for tests of layers, schemes and backends. Parts are named by slot and component, so that this
module imports no plugin; those of installed third-party plugins are found like built-in ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.offers import Mode
from glowplug.core.plugin.registry import PluginSet, entry_point_sources, load_plugins
from glowplug.core.protocols import AttentionBackend, Limits, Model, WeightTarget, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.startup.load_weights import load_model
from glowplug.core.step.batch import Batch
from glowplug.core.step.kv_pool import KVPool
from glowplug.core.testing.harness.plans import bare_plan

ATTENTION = {"mla": "torch_mla", "mha": "torch_mha"}  #: attention backend by the model's kind


@cache
def built_in() -> PluginSet:
    """Return the built-in plugins, loaded once."""
    return load_plugins(entry_points=False)


def installed() -> PluginSet:
    """Return the built-in plugins and those of installed distributions, loaded once."""
    return _installed(tuple(entry_point_sources()))


@cache
def _installed(sources: tuple[PluginSource, ...]) -> PluginSet:
    return load_plugins() if sources else built_in()


def make(slot: str, name: str, plan: EnginePlan, worker: Worker, **options: Any) -> Any:
    """Return the runtime object of the component ``name`` in ``slot``, built in or installed.

    Raises:
        KeyError: there is no such component.
    """
    found = installed().find(slot, name)
    if found is None:
        raise KeyError(f"no {slot} component is called {name!r}")
    module, _, factory = found.component.factory.partition(":")
    parsed = found.component.options(**{"use": name, **options})
    return getattr(importlib.import_module(module), factory)(parsed, plan, worker)


class DictSource:
    """A ``WeightSource`` over tensors in memory.

    Attributes:
        tensors: tensors by name.
        read_names: names of the tensors read so far.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.read_names: list[str] = []

    def open(self, facts: ModelFacts) -> None:
        return

    def entries(self) -> dict[str, TensorFact]:
        return {
            name: TensorFact(str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in self.tensors.items()
        }

    def read(self, target: WeightTarget) -> Tensor:
        self.read_names.append(target.name)
        return self.tensors[target.name][target.index]

    def close(self) -> None:
        return


def plan_for(facts: ModelFacts, dtype: str = "float32", **sizes: Any) -> EnginePlan:
    """Return a plan without choices for ``facts``; ``sizes`` replace fields of ``plan.sizes``."""
    plan = bare_plan(**sizes)
    return replace(plan, dtype=dtype, kv_dtype=dtype, facts=replace(plan.facts, model=facts))


def build_context(
    facts: ModelFacts,
    plan: EnginePlan | None = None,
    *,
    quantization: str = "none",
    attention: AttentionBackend | None = None,
    quantization_options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> BuildContext:
    """Return a build context for one CPU rank, of built-in parts and those named.

    Args:
        facts: the model's facts.
        plan: the plan; None: ``plan_for(facts)``.
        quantization: name of the quantization scheme.
        attention: the attention backend; None: the one of ``ATTENTION`` for the model's kind.
        quantization_options: options of the scheme.
        changes: fields of the context to replace.
    """
    plan = plan or plan_for(facts)
    worker = Worker(device="cpu", dtype=getattr(torch, plan.dtype))
    plain = make("quantization", "none", plan, worker)
    scheme = make("quantization", quantization, plan, worker, **(quantization_options or {}))
    backend = attention or make("attention", ATTENTION[facts.kind], plan, worker)
    context = BuildContext(
        facts=facts,
        worker=worker,
        dtype=worker.dtype,
        context=plan.sizes.context_length,
        scheme=scheme,
        plain=plain,
        parallel=ParallelStack([make("parallel", "single", plan, worker)]),
        collectives=make("collectives", "local", plan, worker),
        attention=backend,
        ops=make("ops", "torch", plan, worker),
    )
    return replace(context, **changes)


def build_model(
    facts: ModelFacts,
    tensors: Mapping[str, Tensor],
    context: BuildContext | None = None,
    **more: Any,
) -> tuple[Model, BuildContext]:
    """Return a loaded model of ``facts`` and the context that it was built in.

    ``more`` is passed to :func:`build_context`.
    """
    context = context or build_context(facts, **more)
    families = [found.component for found in installed().components("model")]
    name = next(
        c.name for c in families if facts.architecture in getattr(c.offers, "architectures", ())
    )
    plan = plan_for(facts)
    model: Model = make("model", name, plan, context.worker).build(context)
    load_model(model, DictSource(tensors), facts)
    return model, context


class Stepper:
    """A driver that steps a model over sequences of token ids, with a cache of its own.

    A prompt is prefilled first, then tokens are decoded one at a time.
    """

    def __init__(
        self, model: Model, context: BuildContext, rows: int = 8, length: int = 256
    ) -> None:
        self.model = model
        self.attention = context.attention
        layout = self.attention.kv_layout()
        self.page = layout.page_size
        columns = -(-length // self.page)
        self.pool = KVPool(layout, rows * columns + 1, "cpu")
        self._pages = np.arange(1, rows * columns + 1, dtype=np.int32).reshape(rows, columns)
        self.attention.reserve(
            Limits(
                rows=rows,
                context=length,
                num_pages=self.pool.num_pages,
                width=1,
                vocab=context.facts.vocab_size,
                kv=self.pool.layers,
            )
        )
        self.lengths = [0] * rows
        self.step = 0

    @torch.inference_mode()
    def hidden(
        self,
        chunks: Mapping[int, list[int]],
        decodes: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Batch]:
        """Run a step and return its hidden states [T, hidden] and the batch.

        Args:
            chunks: row -> its next tokens.
            decodes: number of decoding rows, which come first.
            extra: further fields of ``batch.extra``.
        """
        batch = self._batch(chunks, decodes)
        batch.extra.update(extra or {})
        self.attention.plan_step(batch, None)
        hidden = self.model.forward(batch.input_ids, batch.positions, batch)
        for row, chunk in chunks.items():
            self.lengths[row] += len(chunk)
        return hidden, batch

    @torch.inference_mode()
    def fill(self, row: int, ids: list[int], previous: Tensor) -> None:
        """Have the model, a NextN layer, store the cache entries of a row's next tokens.

        Args:
            row: the row.
            ids: the row's next tokens.
            previous: hidden states at the positions before these tokens, [T, hidden].
        """
        batch = self._batch({row: ids}, 0)
        model: Any = self.model
        model.fill(batch.input_ids, batch.positions, batch.kv_slots, previous)
        self.lengths[row] += len(ids)

    @torch.inference_mode()
    def logits(self, chunks: Mapping[int, list[int]], decodes: int = 0) -> Tensor:
        """Run a step and return the logits of all its tokens, float32 [T, V]."""
        return self.model.logits(self.hidden(chunks, decodes)[0])

    def greedy(self, prompt: list[int], count: int, row: int = 0) -> list[int]:
        """Decode greedily: return the ``count`` tokens that follow ``prompt``."""
        logits = self.logits({row: prompt})
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.logits({row: tokens[-1:]}, decodes=1)[-1].argmax()))
        return tokens

    def _batch(self, chunks: Mapping[int, list[int]], decodes: int) -> Batch:
        """Return the batch of ``chunks``, with the device fields on the CPU."""
        count = len(chunks)
        rows = np.array(list(chunks), np.int32)
        queries = np.array([len(chunk) for chunk in chunks.values()], np.int32)
        before = np.array([self.lengths[row] for row in chunks], np.int32)
        ids = np.array(list(chain.from_iterable(chunks.values())), np.int32)
        self.step += 1
        batch = Batch(
            step=self.step,
            mode=Mode.DECODE if decodes == count else Mode.PREFILL,
            rows=rows,
            epochs=np.zeros(count, np.int64),
            num_decodes=decodes,
            query_lens=queries,
            kv_lens=before + queries,
            samples=np.ones(count, bool),
            prompt_ids=ids[int(queries[:decodes].sum()) :],
            pages=self._pages[rows],
        )
        self._set_device_fields(batch, ids)
        return batch

    def _set_device_fields(self, batch: Batch, ids: NDArray[np.int32]) -> None:
        queries = batch.query_lens
        starts = np.concatenate([[0], np.cumsum(queries)])
        owner = np.repeat(np.arange(batch.num_rows), queries)
        positions = np.arange(len(ids)) - starts[owner] + (batch.kv_lens - queries)[owner]
        kv_slots = batch.pages[owner, positions // self.page] * self.page + positions % self.page
        batch.input_ids = _tensor(ids, np.int64)
        batch.positions = _tensor(positions, np.int64)
        batch.kv_slots = _tensor(kv_slots, np.int64)
        batch.row_ids = _tensor(batch.rows, np.int64)
        batch.kv_lens_device = _tensor(batch.kv_lens, np.int32)
        batch.query_starts = _tensor(starts, np.int32)
        batch.page_table = _tensor(batch.pages, np.int32)


def _tensor(values: NDArray[Any], dtype: type[np.integer[Any]]) -> Tensor:
    """Return a tensor of ``values`` in ``dtype``."""
    return torch.from_numpy(values.astype(dtype))
