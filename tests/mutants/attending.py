"""Faults planted in attention backends over a per-head cache."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.suites.attention import MhaSuite
from glowplug.plugins.attention.mha.torch import TorchMhaOptions
from glowplug.plugins.attention.mha.torch_runtime import TorchMha
from tests.mutants.framework import Mutant, Planter


class Attention(MhaSuite):
    def make(self, plan: EnginePlan, worker: Worker) -> Any:
        return TorchMha(TorchMhaOptions(), plan, worker)


attention = Planter("attention", Attention)
RANDOM = "test_random_layouts"
LAYERS = "test_each_layer_has_its_own_cache"


def kind(fault: str, by: str, kind: type[TorchMha]) -> Mutant:
    """Return the mutant of a changed class."""
    return attention.returning(
        fault, by, lambda plan, worker: kind(TorchMhaOptions(), plan, worker)
    )


class FirstLayerRead(TorchMha):
    def _cached(self, group: Any, query: Tensor, pool: Any, layer: Any) -> Tensor:
        return super()._cached(group, query, self._kv[0], layer)


class FirstLayerWritten(TorchMha):
    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        pool = self._kv[layer.index]
        before = {name: pool[name][self._kv_slots].clone() for name in pool}
        out = super().mha(q, k, v, layer)
        for name in pool:
            self._kv[0][name][self._kv_slots] = pool[name][self._kv_slots]
            if layer.index:
                pool[name][self._kv_slots] = before[name]
        return out


class DraftInTargetLayer(TorchMha):
    """The layers of a draft share the caches of the target's layers."""

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        layers = self._plan.facts.model.num_layers
        return super().mha(q, k, v, replace(layer, index=layer.index % layers))


class KeysAndValuesSwapped(TorchMha):
    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        out = super().mha(q, k, v, layer)
        pool = self._kv[layer.index]
        pool["k"][self._kv_slots], pool["v"][self._kv_slots] = v, k
        return out


class NothingStored(TorchMha):
    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        pool = self._kv[layer.index]
        before = {name: pool[name][self._kv_slots].clone() for name in pool}
        out = super().mha(q, k, v, layer)
        for name in pool:
            pool[name][self._kv_slots] = before[name]
        return out


class SharedHeads(TorchMha):
    """Query heads are dealt to key heads in turn, not in blocks."""

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        order = torch.arange(layer.heads).view(-1, layer.kv_heads).t().flatten()
        return super().mha(q[:, order], k, v, layer)


class WrongScale(TorchMha):
    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        return super().mha(q, k, v, replace(layer, scale=layer.scale * 1.001))


class PaddingGivesNan(TorchMha):
    def plan_step(self, batch: Any, graph: object | None) -> None:
        super().plan_step(batch, graph)
        self._lens = batch.kv_lens_device

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        out = super().mha(q, k, v, layer)
        if len(self._lens) == len(out):
            out[self._lens == 0] = torch.nan
        return out


class FirstPoolKept(TorchMha):
    def reserve(self, limits: Any) -> None:
        if not self._kv:
            super().reserve(limits)


class NoDraftLayers(TorchMha):
    def kv_layout(self) -> Any:
        layout = super().kv_layout()
        return replace(layout, layers=self._plan.facts.model.num_layers)


class FixedPages(TorchMha):
    def __init__(self, options: Any, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._page_size = 16


def batch(fault: str, by: str, **changes: Any) -> Mutant:
    """Return the mutant that plans steps with changed fields of the batch.

    ``changes``: field -> function from the batch to the changed value.
    """

    def plan_step(correct: Any, batch: Any, graph: object | None) -> None:
        changed = copy.copy(batch)
        for name, value in changes.items():
            setattr(changed, name, value(batch))
        correct(changed, graph)

    return attention.swap(fault, by, "plan_step", plan_step)


def _shorter(batch: Any) -> Any:
    lens = batch.kv_lens_device.clone()
    lens[: batch.num_decodes] -= (lens[: batch.num_decodes] > 1).int()
    return lens


MUTANTS = [
    kind("keys are read from the first layer", LAYERS, FirstLayerRead),
    kind("entries are written to the first layer", LAYERS, FirstLayerWritten),
    kind("a draft shares the target's layers", LAYERS, DraftInTargetLayer),
    kind(
        "keys and values are stored in each other's place",
        "test_the_step_is_stored",
        KeysAndValuesSwapped,
    ),
    kind("nothing is stored", "test_chunked_equals_whole", NothingStored),
    kind("query heads have other key heads", RANDOM, SharedHeads),
    kind("the scale is 0.1 % too large", RANDOM, WrongScale),
    kind("padding rows give NaN", "test_padded_and_idle_rows_are_harmless", PaddingGivesNan),
    kind("the second pool is ignored", "test_a_second_pool_replaces_the_first", FirstPoolKept),
    kind("the layout has no draft layers", "test_the_layout_has_layers_for_a_draft", NoDraftLayers),
    kind("the page size is fixed", RANDOM, FixedPages),
    batch(
        "rows read each other's pages",
        RANDOM,
        pages=lambda b: b.pages[::-1].copy(),
        page_table=lambda b: b.page_table.flip(0),
    ),
    batch(
        "the host's lengths are taken",
        "test_lengths_known_on_the_device_only",
        kv_lens_device=lambda b: torch.from_numpy(b.kv_lens),
    ),
    batch(
        "the newest key is left out",
        RANDOM,
        kv_lens_device=_shorter,
        kv_lens=lambda b: _shorter(b).numpy(),
    ),
    batch(
        "the first key is ignored",
        "test_a_first_key_is_where_attention_begins",
        first_key=lambda b: 0,
    ),
    batch("trees are chains", "test_trees", tree_mask=lambda b: None),
    batch("the span of a tree is its step", "test_masks_of_earlier_passes", tree_span=lambda b: 0),
    batch(
        "the next slot is written", "test_the_step_is_stored", kv_slots=lambda b: b.kv_slots.roll(1)
    ),
    attention.swap(
        "no entries are moved",
        "test_entries_are_moved_together",
        "move_entries",
        lambda move, s, t, layers: None,
    ),
    attention.swap(
        "entries of one layer are moved",
        "test_entries_are_moved_together",
        "move_entries",
        lambda move, s, t, layers: move(s, t, layers[:1]),
    ),
    attention.swap(
        "entries are moved the other way",
        "test_entries_are_moved_together",
        "move_entries",
        lambda move, s, t, layers: move(t, s, layers),
    ),
    attention.swap(
        "an entry is missing in the layout",
        "test_layout_names_the_entries",
        "kv_layout",
        lambda layout: replace(layout(), entries=layout().entries[:1]),
    ),
]
