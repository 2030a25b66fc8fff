"""Runtime of the attention backend ``torch_mha``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glowplug.core.facts.kv_layout import KVLayout, head_entries
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Limits, MhaLayer, MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.mha import reference as mha_reference
from glowplug.kernels.paged.merge_states_reference import merge_states
from glowplug.plugins.attention.mha.torch import TorchMhaOptions
from glowplug.plugins.attention.shared.entry_moves import TorchEntryMoves
from glowplug.plugins.attention.shared.torch_groups import (
    Group,
    GroupLimits,
    LongRow,
    plan_groups,
    store,
)

GATHERED_NUMBERS = 1 << 27  #: most key and value elements gathered at once for decode rows
#: most key and value elements gathered at once for prefill rows; a longer cached prefix is read in
#: pieces
PIECE_NUMBERS = 1 << 24


class TorchMha:
    """Per-head attention over a paged cache of ``k`` and ``v``, with the key heads of this rank."""

    mla_projected = None

    def __init__(self, options: TorchMhaOptions, plan: EnginePlan, worker: Worker) -> None:
        self._plan = plan
        self._page_size = plan.sizes.page_size
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._kv: tuple[Mapping[str, Tensor], ...] = ()
        self._groups: list[Group | LongRow] = []
        self._kv_slots: Tensor | None = None
        self._moves = TorchEntryMoves()
        self._kv_heads = plan.local_kv_heads
        self._head_dim = plan.facts.model.head_dim
        per_key = 2 * self._kv_heads * self._head_dim
        self._limits = GroupLimits(
            decode_keys=max(64, GATHERED_NUMBERS // per_key), keys=max(64, PIECE_NUMBERS // per_key)
        )

    def kv_layout(self) -> KVLayout:
        return self._plan.kv_layout(head_entries)

    def reserve(self, limits: Limits) -> None:
        self._kv = limits.kv
        self._moves.reserve(limits.kv)

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        self._kv_slots = batch.kv_slots
        self._groups = plan_groups(batch, self._page_size, self._limits, self._dtype, self._dtype)

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        raise NotImplementedError("torch_mha offers kind mha only")

    def store_mla(self, latent: Tensor, k_rope: Tensor, kv_slots: Tensor, layer: MlaLayer) -> None:
        raise NotImplementedError("torch_mha offers kind mha only")

    def move_entries(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        self._moves.run(sources, targets, layers)

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: MhaLayer) -> Tensor:
        pool = self._kv[layer.index]
        k = store(pool["k"], self._kv_slots, k)
        v = store(pool["v"], self._kv_slots, v)
        outputs = []
        for group in self._groups:
            query = group.take(q)
            if isinstance(group, LongRow):
                output = self._long(group, query, group.take(k), group.take(v), layer)
            elif group.bias is None:
                output = group.unpack(
                    mha_reference.attend_causal(
                        group.pack(query),
                        group.pack(group.take(k)),
                        group.pack(group.take(v)),
                        layer.scale,
                    )
                )
            else:
                output = self._cached(group, query, pool, layer)
            outputs.append(output.reshape(group.tokens, layer.heads * layer.head_dim))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs) if outputs else q.new_empty(0, layer.heads * layer.head_dim)

    def store_mha(self, k: Tensor, v: Tensor, kv_slots: Tensor, layer: MhaLayer) -> None:
        pool = self._kv[layer.index]
        store(pool["k"], kv_slots, k)
        store(pool["v"], kv_slots, v)

    def _cached(
        self, group: Group, query: Tensor, pool: Mapping[str, Tensor], layer: MhaLayer
    ) -> Tensor:
        assert group.bias is not None
        key = group.gather(pool["k"]).to(query.dtype)
        value = group.gather(pool["v"]).to(query.dtype)
        return group.unpack(
            mha_reference.attend(group.pack(query), key, value, layer.scale, group.bias)
        )

    def _long(
        self, row: LongRow, query: Tensor, key: Tensor, value: Tensor, layer: MhaLayer
    ) -> Tensor:
        pool = self._kv[layer.index]
        state = mha_reference.partial_attention(query, key, value, layer.scale, causal=True)
        for kv_slots in row.pieces:
            cached = pool["k"].index_select(0, kv_slots), pool["v"].index_select(0, kv_slots)
            state = merge_states(
                *state, *mha_reference.partial_attention(query, *cached, layer.scale, causal=False)
            )
        return state[0].to(query.dtype)
