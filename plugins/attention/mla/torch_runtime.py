"""Runtime of the attention backend ``torch_mla``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Limits, MhaLayer, MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.elementwise import cpu_small
from glowplug.kernels.mha import reference as mha_reference
from glowplug.kernels.mla import reference as mla_reference
from glowplug.kernels.paged.merge_states_reference import merge_states
from glowplug.plugins.attention.mla.torch import TorchMlaOptions
from glowplug.plugins.attention.shared.entry_moves import TorchEntryMoves
from glowplug.plugins.attention.shared.host_row import HostRow, host_row
from glowplug.plugins.attention.shared.kv_layout import parted_latent_entries
from glowplug.plugins.attention.shared.torch_groups import (
    Group,
    GroupLimits,
    LongRow,
    plan_groups,
    store,
)

GATHERED_NUMBERS = 1 << 26  #: most latent elements gathered at once for decode rows
#: most key and value elements expanded from latents at once for prefill rows
EXPANDED_NUMBERS = 1 << 24


class TorchMla:
    """Latent attention over a paged cache of ``latent`` and ``rope``.

    Decode rows attend in latent space (absorbed). Prefill rows expand latents to per-head keys and
    values; a cached prefix longer than ``GroupLimits.keys`` is expanded in pieces, whose partial
    states are merged. With ``absorb = false`` every row expands its whole cache and attends to the
    whole at once.
    """

    mla_projected = None

    def __init__(self, options: TorchMlaOptions, plan: EnginePlan, worker: Worker) -> None:
        self._absorb = options.absorb
        self._plan = plan
        self._page_size = plan.sizes.page_size
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._kv: tuple[Mapping[str, Tensor], ...] = ()
        self._groups: list[Group | LongRow] = []
        self._row: HostRow | None = None
        self._kv_slots: Tensor | None = None
        self._moves = TorchEntryMoves()
        self._limits = _limits(plan, self._absorb)
        plain = self._absorb and self._dtype is torch.float32 and plan.kv_dtype == "float32"
        self._row_keys = (
            cpu_small.row_keys(plan.facts.model.num_heads, *_sizes(plan)) if plain else 0
        )

    def kv_layout(self) -> KVLayout:
        return self._plan.kv_layout(parted_latent_entries)

    def reserve(self, limits: Limits) -> None:
        self._kv = limits.kv
        self._moves.reserve(limits.kv)

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        self._kv_slots = batch.kv_slots
        self._row = host_row(batch, self._page_size, cpu_small.ROW_QUERIES, self._row_keys)
        self._groups = (
            []
            if self._row is not None
            else plan_groups(
                batch,
                self._page_size,
                self._limits,
                torch.float32 if self._absorb else self._dtype,
                self._dtype,
            )
        )

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        pool = self._kv[layer.index]
        if self._row is not None:
            return _attend_row(self._row, q_nope, q_rope, latent, k_rope, pool, layer)
        latent = store(pool["latent"], self._kv_slots, latent)
        k_rope = store(pool["rope"], self._kv_slots, k_rope)
        outputs = []
        for group in self._groups:
            query = group.take(q_nope), group.take(q_rope)
            if isinstance(group, LongRow):
                output = self._long(group, *query, group.take(latent), group.take(k_rope), layer)
            elif group.decode and self._absorb:
                output = self._absorbed(group, *query, pool, layer)
            elif group.bias is None:
                output = self._own(group, *query, group.take(latent), group.take(k_rope), layer)
            else:
                output = self._expanded(group, *query, pool, layer)
            outputs.append(output.reshape(group.tokens, layer.heads * layer.v_dim))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs) if outputs else q_nope.new_empty(0, layer.heads * layer.v_dim)

    def store_mla(self, latent: Tensor, k_rope: Tensor, kv_slots: Tensor, layer: MlaLayer) -> None:
        pool = self._kv[layer.index]
        store(pool["latent"], kv_slots, latent)
        store(pool["rope"], kv_slots, k_rope)

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: MhaLayer) -> Tensor:
        raise NotImplementedError("torch_mla offers kind mla only")

    def store_mha(self, k: Tensor, v: Tensor, kv_slots: Tensor, layer: MhaLayer) -> None:
        raise NotImplementedError("torch_mla offers kind mla only")

    def move_entries(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        self._moves.run(sources, targets, layers)

    def _absorbed(
        self,
        group: Group,
        q_nope: Tensor,
        q_rope: Tensor,
        pool: Mapping[str, Tensor],
        layer: MlaLayer,
    ) -> Tensor:
        assert group.bias is not None
        latent = group.gather(pool["latent"]).to(q_nope.dtype)
        rope = group.gather(pool["rope"]).to(q_nope.dtype)
        q_latent = group.pack(mla_reference.absorb_query(q_nope, layer.w_uk))
        out = mla_reference.attend_latent(
            q_latent, group.pack(q_rope), latent, rope, layer.scale, group.bias
        )
        return mla_reference.project_output(group.unpack(out), layer.w_uv)

    def _own(
        self,
        group: Group,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        rope: Tensor,
        layer: MlaLayer,
    ) -> Tensor:
        key, value = _expand(latent, rope, layer)
        query = torch.cat((q_nope, q_rope), dim=-1)
        return group.unpack(
            mha_reference.attend_causal(
                group.pack(query), group.pack(key), group.pack(value), layer.scale
            )
        )

    def _expanded(
        self,
        group: Group,
        q_nope: Tensor,
        q_rope: Tensor,
        pool: Mapping[str, Tensor],
        layer: MlaLayer,
    ) -> Tensor:
        assert group.bias is not None
        shape = (group.rows, group.length, layer.heads)
        latent = group.gather(pool["latent"]).flatten(0, 1)
        rope = group.gather(pool["rope"]).flatten(0, 1)
        key, value = _expand(latent.to(q_nope.dtype), rope.to(q_nope.dtype), layer)
        query = group.pack(torch.cat((q_nope, q_rope), dim=-1))
        out = mha_reference.attend(
            query, key.view(*shape, -1), value.view(*shape, -1), layer.scale, group.bias
        )
        return group.unpack(out)

    def _long(
        self,
        row: LongRow,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        rope: Tensor,
        layer: MlaLayer,
    ) -> Tensor:
        pool = self._kv[layer.index]
        dtype = q_nope.dtype
        query = torch.cat((q_nope, q_rope), dim=-1)
        state = mha_reference.partial_attention(
            query, *_expand(latent, rope, layer), layer.scale, causal=True
        )
        for kv_slots in row.pieces:
            cached = (
                pool["latent"].index_select(0, kv_slots).to(dtype),
                pool["rope"].index_select(0, kv_slots).to(dtype),
            )
            part = mha_reference.partial_attention(
                query, *_expand(*cached, layer), layer.scale, causal=False
            )
            state = merge_states(*state, *part)
        return state[0].to(dtype)


def _attend_row(
    row: HostRow,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    pool: Mapping[str, Tensor],
    layer: MlaLayer,
) -> Tensor:
    """Store the new cache entries of the step's only row, and attend over its cache in numpy.

    Args:
        row: The row.
        q_nope: As in ``AttentionBackend.mla``.
        q_rope: As in ``AttentionBackend.mla``.
        latent: As in ``AttentionBackend.mla``.
        k_rope: As in ``AttentionBackend.mla``.
        pool: The layer's cache entries ``latent`` and ``rope``.
        layer: The layer's weights and sizes.

    Returns:
        As ``AttentionBackend.mla``.
    """
    out = cpu_small.attend_row(
        q_nope.numpy(),
        q_rope.numpy(),
        row.exchange(pool["latent"], latent),
        row.exchange(pool["rope"], k_rope),
        layer.w_uk.numpy(),
        layer.w_uv.numpy(),
        layer.scale,
        row.hidden,
    )
    return torch.from_numpy(out)


def _sizes(plan: EnginePlan) -> tuple[int, int, int, int]:
    """Return the sizes of a key's non-rotary and rotary parts, of a latent and of a value."""
    facts = plan.facts.model
    return (
        int(facts.config.get("qk_nope_head_dim", 128)),
        facts.qk_rope_head_dim,
        facts.kv_lora_rank,
        int(facts.config.get("v_head_dim", 128)),
    )


def _limits(plan: EnginePlan, absorb: bool) -> GroupLimits:
    facts = plan.facts.model
    nope, rope, _, value = _sizes(plan)
    per_key = facts.num_heads * (nope + rope + value)
    expanded = max(64, EXPANDED_NUMBERS // per_key)
    gathered = max(64, GATHERED_NUMBERS // max(1, facts.kv_lora_rank))
    return GroupLimits(
        decode_keys=gathered if absorb else expanded, keys=expanded, own=absorb, split=absorb
    )


def _expand(latent: Tensor, rope: Tensor, layer: MlaLayer) -> tuple[Tensor, Tensor]:
    """Return keys [N, H, nope + P] and values [N, H, V] from latents and rotary key parts.

    Args:
        latent: Latents, [N, C].
        rope: Rotary key parts, [N, P].
        layer: The layer's weights and sizes.
    """
    k_nope, value = layer.expand(latent)
    return torch.cat((k_nope, rope.unsqueeze(1).expand(-1, layer.heads, -1)), dim=-1), value
