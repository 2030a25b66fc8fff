"""The float32 reference of a model: plain torch on the CPU, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.engine.device_fields import flatten, host_arrays, set_device_fields
from glowplug.core.engine.stream_probe import first_pages, step_of
from glowplug.core.facts.machine import this_machine
from glowplug.core.layers.decoder import DecoderModel
from glowplug.core.layers.module import Module
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Limits, WeightSource, WeightTarget
from glowplug.core.startup.components import build_component, build_context, make_worker
from glowplug.core.startup.load_weights import load_model
from glowplug.core.startup.lone_rank import without_memory_limit
from glowplug.core.step.batch import Batch
from glowplug.core.step.kv_pool import KVPool
from glowplug.core.step.to_device import send

#: fields of the configuration that say which model it is; all others are left to the plan
MODEL_FIELDS = ("model", "weights", "seed", "context_length")


def reference_plan(config: Mapping[str, Any], plugins: PluginSet) -> EnginePlan:
    """Return the plan of the float32 reference for the model of ``config``.

    On a CPU the plan chooses plain torch throughout, and quantised weights are dequantised.

    Raises:
        PlanRefused: the model cannot be computed in float32 on a CPU.
    """
    kept = {name: config[name] for name in MODEL_FIELDS if name in config}
    return make_plan(
        {
            **kept,
            "device": "cpu",
            "dtype": "float32",
            "skip_tokenizer": True,
            "executor": {"use": "inline"},
            "scheduler": {"max_running_requests": 1},
        },
        source="the float32 reference",
        plugins=plugins,
        hardware=without_memory_limit(this_machine()),
    )


@dataclass(frozen=True)
class ReferenceStep:
    """One layer of the reference.

    Attributes:
        layer: number of the layer.
        own: stream after the layer in the reference's own run, float32 [n, tokens, hidden].
        from_engine: stream that the layer makes of the engine's stream before it.
    """

    layer: int
    own: Tensor
    from_engine: Tensor


class Reference:
    """The reference model over sequences of equal length.

    Args:
        plan: the result of ``reference_plan``.
        plugins: the loaded plugins.
        ids: token ids, int32 [n, tokens].

    Raises:
        ValueError: the model family is not made of decoder layers.
    """

    def __init__(self, plan: EnginePlan, plugins: PluginSet, ids: np.ndarray) -> None:
        self._facts = plan.facts.model
        worker = make_worker(plan, 0)
        self._context = build_context(plan, plugins, worker)
        model = build_component(plugins, plan.choice("model"), plan, worker).build(self._context)
        if not isinstance(model, DecoderModel):
            raise ValueError(
                f"{self._facts.architecture} is not made of decoder layers (core/layers/decoder.py)"
            )
        self._model = model
        self._source: WeightSource = build_component(plugins, plan.choice("weights"), plan, worker)
        self._shape = ids.shape
        self._batch = self._prepare(plan, np.concatenate([ids, ids]))

    def __enter__(self) -> Reference:
        self._source.open(self._facts)
        self._load(*self._outer())
        return self

    def __exit__(self, *error: object) -> None:
        self._source.close()

    def _outer(self) -> list[Module]:
        """Return the modules outside the layers."""
        return [self._model.embed, self._model.norm, self._model.head]

    def _load(self, *modules: Module) -> None:
        """Load the weights of some modules."""
        load_model(_Parts(modules), self._source, self._facts)

    def _prepare(self, plan: EnginePlan, ids: np.ndarray) -> Batch:
        """Reserve a KV cache for the sequences ``ids`` [rows, tokens] and return their step."""
        rows, length = ids.shape
        page = plan.sizes.page_size
        pages = first_pages(rows, length, page)
        attention = self._context.attention
        pool = KVPool(attention.kv_layout(), 1 + pages.size, "cpu")
        attention.reserve(
            Limits(
                rows=rows,
                context=plan.sizes.positions,
                num_pages=pool.num_pages,
                width=1,
                vocab=self._facts.vocab_size,
                kv=pool.layers,
                hidden=self._facts.hidden_size,
            )
        )
        batch = step_of(pages, ids, length)
        flat = flatten(batch, batch.kv_lens, page)
        views = send(host_arrays(batch, batch.kv_lens, flat, None, None), torch.device("cpu"))
        set_device_fields(batch, views, False, None)
        return batch

    @torch.inference_mode()
    def embedded(self) -> Tensor:
        """Return the embeddings of the tokens, [n, tokens, hidden]."""
        count, length = self._shape
        ids = self._batch.input_ids[: count * length]
        return self._model.embed.forward(ids).view(count, length, -1)

    @torch.inference_mode()
    def layers(self, streams: Tensor) -> Iterator[ReferenceStep]:
        """Compute all layers, and free each one's weights before the next one's are loaded.

        Args:
            streams: the engine's streams, [n, tokens, 1 + layers, hidden].
        """
        count, length = self._shape
        batch = self._batch
        at = self._model.rope.at(batch.positions)
        own = self.embedded()
        for number in range(self._model.num_layers):
            layer = self._model.layers[number]
            self._load(layer)
            both = torch.cat([own, streams[:, :, number]]).view(2 * count * length, -1)
            self._context.attention.plan_step(batch, None)
            terms, residual = layer.forward(both, None, at, batch)
            # the final norm is used only to add the layer's terms to the stream
            summed = self._model.norm.add(terms, residual)[1].view(2 * count, length, -1)
            own = summed[:count].clone()
            yield ReferenceStep(number, own, summed[count:].clone())
            del layer
            self._model.layers[number] = None  # type: ignore[call-overload]

    @torch.inference_mode()
    def logits(self, stream: Tensor) -> Tensor:
        """Return the logits [n, tokens, V] of the stream after the last layer."""
        count, length = self._shape
        normed = self._model.norm.forward(stream.reshape(count * length, -1))
        return self._model.logits(normed).view(count, length, -1)


class _Parts:
    """Some modules of a model, as a ``protocols.Model`` to be loaded."""

    def __init__(self, modules: tuple[Module, ...]) -> None:
        self._modules = modules

    def targets(self) -> Iterator[WeightTarget]:
        for module in self._modules:
            yield from module.targets()

    def finalize(self) -> None:
        for module in self._modules:
            module.finalize()

    def ignored(self, name: str) -> bool:
        return True

    def forward(self, *given: object) -> Tensor:
        raise NotImplementedError("parts of a model are only loaded")

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError("parts of a model are only loaded")
