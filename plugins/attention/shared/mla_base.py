"""What the latent-attention backends for GPUs share: the cache, the prologue, the absorbed
products, prefill.

A backend is a subclass with two kernels: ``decode`` over the paged cache (``decode_values`` where a
kernel makes values of it at once) and ``prefill``, ragged multi-head attention that also returns
the log-sum-exp of each query's scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glowplug.core.facts.kv_layout import KVEntry, KVLayout
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import Limits, MhaLayer, MlaLayer, RopeRows, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.formats.fp8 import BLOCK, Blocks
from glowplug.kernels.mla import reference as mla
from glowplug.kernels.paged import merge_states_reference as merge
from glowplug.plugins.attention.shared.absorbed import stored_is_faster
from glowplug.plugins.attention.shared.kv_layout import kv_layers
from glowplug.plugins.attention.shared.prefill_bytes import most_keys
from glowplug.plugins.attention.shared.prefill_calls import RaggedCall, RaggedRows, plan_ragged

Expand = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class _Step:
    """``slots``: int64 [T] where the tokens go. The first ``decode`` tokens are those of decoding
    rows.
    """

    slots: Tensor
    decode: int
    ragged: list[RaggedRows]


class PagedMla:
    """Latent attention over one cache entry ``kv``: a token's normed latent, then its rotated key
    part.

    Decoding rows attend in latent space: their queries are absorbed, [latent size | rotary size] a
    head. Prefill rows expand latents to per-head keys and values.

    Attributes:
        follows: kernels of ``decode`` wait for those before them
        (``kernels/launch/dependent_launch.py``), so that the first
            may start before the prologue ends, and what comes behind them before they end. NOTE:
            FlashMLA's are launched so that they may start early, too, and then read queries before
            they wait.
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
        self._step: _Step | None = None

    # ---- a subclass's ----------------------------------------------------------------------------

    def plan_decode(
        self, batch: Batch, slot: object | None, first: int, rows: int, width: int
    ) -> None:
        """Prepare ``decode`` for ``rows`` rows from number ``first`` on, ``width`` tokens each;
        part of ``plan_step``.

        Called only where there are such rows. With a slot, what it makes for captured kernels
        belongs to the slot.
        """

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        """Absorbed query [n, H, lora + rope] over kv [slots, lora + rope] -> [n, H, lora], of the
        query's dtype.

        A row's last query sees all its keys, each one before it one less.
        """
        raise NotImplementedError

    def decode_values(
        self, query: Tensor, kv: Tensor, layer: MlaLayer, stored: Blocks | None, out: Tensor
    ) -> None:
        """``decode``, then W_UV's product into out [n, H, v_dim], of ``stored`` blocks [H, C, V] if
        there are any.
        """
        latent = self.decode(query, kv, layer.scale, layer)
        self._kernels.project(latent, layer.w_uv, out, self.follows, stored)

    def plan_prefill(self, ragged: list[RaggedRows]) -> None:
        """Prepare ``attend_ragged`` for every call of the step."""

    def attend_ragged(
        self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor
    ) -> Tensor:
        """One planned call; by ``prefill``, unless a library plans its calls."""
        return self.prefill(
            q, k, v, call.q_starts, call.k_starts, call.max_q, call.max_k, scale, call.causal, out
        )

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_starts: Tensor,
        k_starts: Tensor,
        max_q: int,
        max_k: int,
        scale: float,
        causal: bool,
        out: Tensor,
    ) -> Tensor:
        """q [n, H, nope + rope], k [m, H, nope + rope], v [m, H, v_dim] into out [n, H, v_dim] ->
        lse float32 [n, H].

        q_starts, k_starts int32 [rows + 1] on the device. ``lse`` is the natural logarithm; q, k
        and v may be strided in all but the last dimension.
        """
        raise NotImplementedError

    # ---- AttentionBackend ------------------------------------------------------------------------

    def kv_layout(self) -> KVLayout:
        entry = KVEntry("kv", (self._lora + self._rope,), self._plan.kv_dtype)
        return KVLayout(kv_layers(self._plan), self._page_size, (entry,))

    def reserve(self, limits: Limits) -> None:
        self._kv = tuple(layer["kv"] for layer in limits.kv)

    def plan_step(self, batch: Batch, slot: object | None) -> None:
        decodes = batch.num_decodes
        tokens = batch.decode_tokens
        if decodes:
            self.plan_decode(batch, slot, 0, decodes, tokens // decodes)
        ragged = (
            plan_ragged(batch, self._page_size, self._most_keys) if decodes < batch.num_rows else []
        )
        if ragged:
            self.plan_prefill(ragged)
        self._step = _Step(batch.slots, tokens, ragged)

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        step = self._planned()
        kv = self._kv[layer.index]
        count = step.decode
        self._kernels.store(latent, k_rope, kv, step.slots)
        absorbed = q_nope.new_empty(count, layer.heads, self._lora + self._rope)
        absorbed[..., self._lora :] = q_rope[:count]
        self._kernels.absorb(q_nope[:count], layer.w_uk, absorbed)
        query = torch.cat((q_nope[count:], q_rope[count:]), dim=-1)
        own = torch.cat((latent[count:], k_rope[count:]), dim=-1)
        return self._attend(absorbed, query, own, layer)

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
        count = step.decode
        absorbed = query.new_empty(count, layer.heads, self._lora + self._rope)
        own = query.new_empty(query.shape[0] - count, self._lora + self._rope)
        self._kernels.prologue(
            query,
            compressed,
            norm_weight,
            eps,
            at.cos_sin,
            at.interleaved,
            self._kv[layer.index],
            step.slots,
            absorbed,
            own,
            layer.w_uk,
            self.follows,
            self._stored(layer, count)[0],
        )
        return self._attend(absorbed, query[count:], own, layer)

    def store_mla(self, latent: Tensor, k_rope: Tensor, slots: Tensor, layer: MlaLayer) -> None:
        self._kernels.store(latent, k_rope, self._kv[layer.index], slots)

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: MhaLayer) -> Tensor:
        raise NotImplementedError("it offers kind mla only")

    # ---- the layer's path behind the prologue ----------------------------------------------------

    def _planned(self) -> _Step:
        assert self._step is not None, "plan_step comes first"
        return self._step

    def _attend(self, absorbed: Tensor, query: Tensor, own: Tensor, layer: MlaLayer) -> Tensor:
        """Decoding tokens' absorbed [n, H, lora + rope]; prefill tokens' query [m, H, nope + rope]
        and own keys [m, lora + rope] -> [n + m, H * v_dim]."""
        step = self._planned()
        kv = self._kv[layer.index]
        out = query.new_empty(step.decode + query.shape[0], layer.heads, layer.v_dim)
        if step.decode:
            self.decode_values(
                absorbed, kv, layer, self._stored(layer, step.decode)[1], out[: step.decode]
            )
        for rows in step.ragged:
            at = slice(rows.first - step.decode, rows.first - step.decode + rows.tokens)
            self._ragged(
                rows, query[at], own[at], kv, layer, out[rows.first : rows.first + rows.tokens]
            )
        return out.view(-1, layer.heads * layer.v_dim)

    def _stored(self, layer: MlaLayer, tokens: int) -> tuple[Blocks | None, Blocks | None]:
        """W_UK [H, N, C] and W_UV [H, C, V] as the checkpoint stores them, where that is to be read
        for so many tokens.
        """
        if layer.kv_stored is None:
            return None, None
        (values, scales) = layer.kv_stored
        rows = layer.nope_dim
        uk, uv = stored_is_faster(self._absorbed, layer.heads, tokens)
        return (
            Blocks(values[:, :rows], scales[:, : rows // BLOCK]) if uk else None,
            Blocks(values[:, rows:].transpose(1, 2), scales[:, rows // BLOCK :].transpose(1, 2))
            if uv
            else None,
        )

    def _ragged(
        self, rows: RaggedRows, query: Tensor, own: Tensor, kv: Tensor, layer: MlaLayer, out: Tensor
    ) -> None:
        """query [n, H, nope + rope] and the tokens' own keys [n, lora + rope] into out [n, H,
        v_dim].
        """
        lse = self._call(rows.calls[0], query, own, kv, layer, out)
        if len(rows.calls) == 1:
            return
        total = out.float()
        part = torch.empty_like(out)
        for call in rows.calls[1:]:
            self._merge_into(total, lse, part, self._call(call, query, own, kv, layer, part))
        out.copy_(total)

    def _call(
        self, call: RaggedCall, query: Tensor, own: Tensor, kv: Tensor, layer: MlaLayer, out: Tensor
    ) -> Tensor:
        """One call's attention into ``out``; its log-sum-exps."""
        keys = own if call.slots is None else self._kernels.gather(kv, call.slots, query.dtype)
        k, v = self._expand(keys, layer.w_kv, layer.nope_dim)
        return self.attend_ragged(call, query, k, v, layer.scale, out)


def _kernels(
    device: torch.device,
) -> tuple[Any, Expand, Callable[[Tensor, Tensor, Tensor, Tensor], None]]:
    """``prologue``, ``absorb``, ``project``, ``store`` and ``gather``; ``expand``; ``merge_into``:
    in Triton on a GPU.
    """
    if device.type == "cuda":
        from glowplug.kernels.mla import expand as mla_expand, prologue as mla_prologue
        from glowplug.kernels.paged import merge_states as triton_merge

        return mla_prologue, mla_expand.expand, triton_merge.merge_into
    return mla, mla.expand, merge.merge_into
