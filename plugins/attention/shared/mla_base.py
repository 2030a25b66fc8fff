"""Base class of the latent-attention (MLA) backends for GPUs.

:class:`PagedMla` owns the KV cache, the prologue, the absorbed GEMMs and the prefill path. A
backend is a subclass with two kernels: ``decode`` over the paged cache (or ``decode_values``, if a
kernel computes the values directly), and ``prefill``, ragged multi-head attention that also returns
the log-sum-exp of each query's scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glowplug.core.facts.kv_layout import KVLayout, latent_entries
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import Limits, MhaLayer, MlaLayer, RopeRows, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.formats.fp8 import Blocks
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.mla import reference as mla_reference
from glowplug.kernels.paged import merge_states_reference
from glowplug.plugins.attention.shared.absorbed import stored_is_faster
from glowplug.plugins.attention.shared.entry_moves import entry_moves
from glowplug.plugins.attention.shared.expanded_prefill import Expand, ExpandedPrefill, OwnKeys
from glowplug.plugins.attention.shared.prefill_bytes import most_keys
from glowplug.plugins.attention.shared.prefill_calls import RaggedRows, plan_ragged


@dataclass(eq=False)
class _Step:
    """The planned step of a :class:`PagedMla`.

    Attributes:
        kv_slots: int64 [T], the slot mapping: KV slots of the step's tokens.
        decode: Number of decode tokens, which precede the prefill tokens.
        ragged: Groups of prefill rows and their calls of ragged attention.
    """

    kv_slots: Tensor
    decode: int
    ragged: list[RaggedRows]


class PagedMla(ExpandedPrefill):
    """Latent attention over one cache entry ``kv``: the normed latent, then the rotated key part.

    Decode rows attend in latent space: their queries are absorbed, [latent size | rotary size] per
    head. Prefill rows expand latents to per-head keys and values.

    Attributes:
        follows: Whether every kernel of ``decode`` waits for the kernel before it by itself (PDL,
            see ``kernels/launch/dependent_launch.py``). The first kernel may then start before the
            prologue ends, and the kernel after ``decode`` before ``decode`` ends. NOTE: False for
            FlashMLA: its kernels may start early as well, but read queries before they wait.
    """

    follows = False

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        facts = plan.facts.model
        self._plan = plan
        self._page_size = plan.sizes.page_size
        self._lora = facts.kv_lora_rank
        self._rope = facts.qk_rope_head_dim
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._device = torch.device(worker.device)
        nope = int(facts.config.get("qk_nope_head_dim", 128))
        value = int(facts.config.get("v_head_dim", 128))
        self._most_keys = most_keys(facts.num_heads, nope + self._rope, value, self._dtype.itemsize)
        self._absorbed: str = getattr(options, "absorbed", "bf16")
        self._kernels, self._expand, self._merge_into = _kernels(self._device)
        self._kv: tuple[Tensor, ...] = ()
        self._moves = entry_moves(self._device)
        self._step: _Step | None = None

    # ---- implemented by subclasses ---------------------------------------------------------------

    def plan_decode(
        self, batch: Batch, graph: object | None, first: int, rows: int, width: int
    ) -> None:
        """Prepare ``decode`` for ``rows`` rows from index ``first`` on, ``width`` tokens each.

        Part of ``plan_step``, called only when the step has such rows. ``graph``: key of the
        captured graph to which the prepared tensors belong; None in an eager step.
        """

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        """Compute the attention of absorbed queries over the latent cache.

        A row's last query sees all keys of the row; each query before it sees one key less.

        Args:
            query: Absorbed query, [n, H, lora + rope].
            kv: The layer's cache, [kv_slots, lora + rope].
            scale: Factor by which the scores are multiplied.
            layer: The layer's weights and sizes.

        Returns:
            [n, H, lora] in the query's dtype.
        """
        raise NotImplementedError

    def decode_values(
        self, query: Tensor, kv: Tensor, layer: MlaLayer, stored: Blocks | None, out: Tensor
    ) -> None:
        """Run ``decode`` and multiply its result by W_UV into out [n, H, v_dim].

        Args:
            query: Absorbed query, [n, H, lora + rope].
            kv: The layer's cache, [kv_slots, lora + rope].
            layer: The layer's weights and sizes.
            stored: W_UV as stored FP8 blocks [H, C, V]; None to use the 16-bit weights.
            out: Written, [n, H, v_dim].
        """
        latent = self.decode(query, kv, layer.scale, layer)
        self._kernels.project(latent, layer.w_uv, out, self.follows, stored)

    # ---- AttentionBackend ------------------------------------------------------------------------

    def kv_layout(self) -> KVLayout:
        return self._plan.kv_layout(latent_entries)

    def reserve(self, limits: Limits) -> None:
        self._kv = tuple(layer["kv"] for layer in limits.kv)
        self._moves.reserve(limits.kv)

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        decodes = batch.num_decodes
        tokens = batch.decode_tokens
        if decodes:
            self.plan_decode(batch, graph, 0, decodes, tokens // decodes)
        ragged = (
            plan_ragged(batch, self._page_size, self._most_keys) if decodes < batch.num_rows else []
        )
        if ragged:
            self.plan_prefill(ragged)
        self._step = _Step(batch.kv_slots, tokens, ragged)

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        step = self._planned()
        count = step.decode
        self._kernels.store(latent, k_rope, self._kv[layer.index], step.kv_slots)
        absorbed = self._absorb(q_nope[:count], q_rope[:count], layer)
        query = torch.cat((q_nope[count:], q_rope[count:]), dim=-1)
        own = torch.cat((latent[count:], k_rope[count:]), dim=-1)
        return self._attend(absorbed, query, self._keys_from(own, layer), layer)

    def mla_projected(
        self,
        query: Tensor,
        compressed: Tensor,
        norm_weight: Tensor,
        eps: float,
        at: RopeRows,
        layer: MlaLayer,
    ) -> Tensor:
        step = self._planned()
        absorbed, own = self._prologue(
            query, compressed, norm_weight, eps, at, step.kv_slots, layer, step.decode
        )
        return self._attend(absorbed, query[step.decode :], self._keys_from(own, layer), layer)

    def prepare_mla(
        self,
        query: Tensor,
        compressed: Tensor,
        norm_weight: Tensor,
        eps: float,
        at: RopeRows,
        kv_slots: Tensor,
        layer: MlaLayer,
    ) -> tuple[Tensor, ...]:
        _, own = self._prologue(query, compressed, norm_weight, eps, at, kv_slots, layer, 0)
        return query, *self.keys_of(own, layer)

    def attend_prepared(self, layer: MlaLayer, query: Tensor, *keys: Tensor) -> Tensor:
        count = self._planned().decode
        sizes = [layer.nope_dim, layer.rope_dim]
        q_nope, q_rope = query[:count].split_with_sizes(sizes, dim=-1)
        absorbed = self._absorb(q_nope, q_rope, layer)
        own = [part[count:] for part in keys]
        return self._attend(
            absorbed, query[count:], lambda at: tuple(part[at] for part in own), layer
        )

    def store_mla(self, latent: Tensor, k_rope: Tensor, kv_slots: Tensor, layer: MlaLayer) -> None:
        self._kernels.store(latent, k_rope, self._kv[layer.index], kv_slots)

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: MhaLayer) -> Tensor:
        raise NotImplementedError("this backend offers kind mla only")

    def store_mha(self, k: Tensor, v: Tensor, kv_slots: Tensor, layer: MhaLayer) -> None:
        raise NotImplementedError("this backend offers kind mla only")

    def move_entries(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        self._moves.run(sources, targets, layers)

    # ---- the layer after the prologue ------------------------------------------------------------

    def _planned(self) -> _Step:
        assert self._step is not None, "plan_step must be called first"
        return self._step

    def _absorb(self, q_nope: Tensor, q_rope: Tensor, layer: MlaLayer) -> Tensor:
        """Return the absorbed queries [n, H, lora + rope] of decode tokens.

        Args:
            q_nope: [n, H, nope].
            q_rope: Rotated, [n, H, rope].
            layer: The layer's weights and sizes.
        """
        absorbed = q_nope.new_empty(len(q_nope), layer.heads, self._lora + self._rope)
        if len(absorbed):
            absorbed[..., self._lora :] = q_rope
            self._kernels.absorb(q_nope, layer.w_uk, absorbed)
        return absorbed

    def _prologue(
        self,
        query: Tensor,
        compressed: Tensor,
        norm_weight: Tensor,
        eps: float,
        at: RopeRows,
        kv_slots: Tensor,
        layer: MlaLayer,
        decode: int,
    ) -> tuple[Tensor, Tensor]:
        """Norm, rotate and store the tokens, of which the first ``decode`` are decode tokens.

        Other arguments as in ``PreparedMla.prepare_mla``. The other tokens' queries are rotated in
        place.

        Returns:
            The absorbed queries of the decode tokens, and the cache entries of the others.
        """
        absorbed = query.new_empty(decode, layer.heads, self._lora + self._rope)
        own = query.new_empty(query.shape[0] - decode, self._lora + self._rope)
        self._kernels.prologue(
            query,
            compressed,
            norm_weight,
            eps,
            at.cos_sin,
            at.interleaved,
            self._kv[layer.index],
            kv_slots,
            absorbed,
            own,
            layer.w_uk,
            self.follows,
            self._stored(layer, decode)[0],
        )
        return absorbed, own

    def _keys_from(self, own: Tensor, layer: MlaLayer) -> OwnKeys:
        """Return the keys and values of the prefill tokens' cache entries, [m, lora + rope]."""
        return lambda at: self.keys_of(own[at], layer)

    def _attend(self, absorbed: Tensor, query: Tensor, own: OwnKeys, layer: MlaLayer) -> Tensor:
        """Compute the attention of the decode tokens and then of the prefill tokens.

        Args:
            absorbed: Absorbed queries of the decode tokens, [n, H, lora + rope].
            query: Queries of the prefill tokens, [m, H, nope + rope].
            own: Expanded keys and values of the prefill tokens.
            layer: The layer's weights and sizes.

        Returns:
            [n + m, H * v_dim].
        """
        step = self._planned()
        kv = self._kv[layer.index]
        out = query.new_empty(step.decode + query.shape[0], layer.heads, layer.v_dim)
        if step.decode:
            self.decode_values(
                absorbed, kv, layer, self._stored(layer, step.decode)[1], out[: step.decode]
            )
        for rows in step.ragged:
            at = slice(rows.first - step.decode, rows.first - step.decode + rows.tokens)
            part = out[rows.first : rows.first + rows.tokens]
            self.attend_rows(rows, query[at], partial(own, at), kv, layer, part)
        return out.view(-1, layer.heads * layer.v_dim)

    def _stored(self, layer: MlaLayer, tokens: int) -> tuple[Blocks | None, Blocks | None]:
        """Return W_UK [H, N, C] and W_UV [H, C, V] as stored FP8 blocks, or None for each.

        A weight is None if the layer keeps no FP8 blocks, or if 16-bit weights should be read in a
        step with ``tokens`` decode tokens.
        """
        if layer.kv_stored is None:
            return None, None
        (values, scales) = layer.kv_stored
        rows = layer.nope_dim
        uk, uv = stored_is_faster(self._absorbed, layer.heads, tokens)
        return (
            Blocks(values[:, :rows], scales[:, : rows // FP8_BLOCK]) if uk else None,
            Blocks(values[:, rows:].transpose(1, 2), scales[:, rows // FP8_BLOCK :].transpose(1, 2))
            if uv
            else None,
        )


def _kernels(
    device: torch.device,
) -> tuple[Any, Expand, Callable[[Tensor, Tensor, Tensor, Tensor], None]]:
    """Return a module of kernels and the functions ``expand`` and ``merge_into`` for ``device``.

    They are in Triton on a GPU, otherwise in torch. The module has ``prologue``, ``absorb``,
    ``project``, ``store`` and ``gather``.
    """
    if device.type == "cuda":
        from glowplug.kernels.mla import expand as mla_expand, prologue as mla_prologue
        from glowplug.kernels.paged import merge_states

        return mla_prologue, mla_expand.expand, merge_states.merge_into
    return mla_reference, mla_reference.expand, merge_states_reference.merge_into
