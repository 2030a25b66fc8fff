"""What the multi-head backends for GPUs share: the cache and the split into decoding and prefill
rows.

A backend is a subclass with two kernels, both over the paged cache: ``decode`` and ``prefill``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import Limits, MhaLayer, MlaLayer, ProjectedMla, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.mha.store import mha_store
from glowplug.plugins.attention.shared.kv_layout import local_kv_heads, mha_layout


class PagedMha:
    """Per-head attention over cache entries ``k`` and ``v``, key heads local to this rank.

    A step's keys are stored before anything attends, so that kernels read the cache alone, as it
    keeps them.

    Attributes:
        follows: the kernels of every step wait for those before them
        (``kernels/launch/dependent_launch.py``), so that the
            first may start before the keys are stored.
    """

    mla_projected: ProjectedMla | None = None
    follows = False

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        facts = plan.facts.model
        self._plan = plan
        self._page_size = plan.sizes.page_size
        self._heads = facts.num_heads // axis_size("attn_tp", plan.mesh)
        self._kv_heads = local_kv_heads(plan)
        self._head_dim = facts.head_dim
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._kv: tuple[Mapping[str, Tensor], ...] = ()
        self._slots: Tensor | None = None
        self._decode_tokens = 0

    # ---- a subclass's ----------------------------------------------------------------------------

    def plan_decode(self, batch: Batch, slot: object | None, rows: int, width: int) -> None:
        """Prepare ``decode`` for the first ``rows`` rows, ``width`` tokens each; part of
        ``plan_step``.

        Called only where there are such rows. With a slot, what it makes for captured kernels
        belongs to the slot.
        """
        raise NotImplementedError

    def decode(self, query: Tensor, kv: Mapping[str, Tensor], scale: float) -> Tensor:
        """query [n, H, D] over the layer's cache -> [n, H, D].

        A row's last query sees all its keys, each one before it one less.
        """
        raise NotImplementedError

    def plan_prefill(self, batch: Batch, first: int) -> None:
        """Prepare ``prefill`` for the rows from number ``first`` on; called only where there are
        such.
        """
        raise NotImplementedError

    def prefill(
        self, query: Tensor, k: Tensor, v: Tensor, kv: Mapping[str, Tensor], scale: float
    ) -> Tensor:
        """query [m, H, D] and own k and v [m, K, D] of the prefill rows' tokens -> [m, H, D]."""
        raise NotImplementedError

    # ---- AttentionBackend ------------------------------------------------------------------------

    def kv_layout(self) -> KVLayout:
        return mha_layout(self._plan)

    def reserve(self, limits: Limits) -> None:
        self._kv = limits.kv

    def plan_step(self, batch: Batch, slot: object | None) -> None:
        decodes = batch.num_decodes
        tokens = batch.decode_tokens
        self._slots = batch.slots
        self._decode_tokens = tokens
        if decodes:
            self.plan_decode(batch, slot, decodes, tokens // decodes)
        if decodes < batch.num_rows:
            self.plan_prefill(batch, decodes)

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        raise NotImplementedError("it offers kind mha only")

    def store_mla(self, latent: Tensor, k_rope: Tensor, slots: Tensor, layer: MlaLayer) -> None:
        raise NotImplementedError("it offers kind mha only")

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: MhaLayer) -> Tensor:
        assert self._slots is not None, "plan_step comes first"
        kv = self._kv[layer.index]
        count = self._decode_tokens
        tokens = q.shape[0]
        mha_store(k, v, kv["k"], kv["v"], self._slots, self.follows and count == tokens)
        parts = [self.decode(q[:count], kv, layer.scale)] if count else []
        if count < tokens:
            parts.append(self.prefill(q[count:], k[count:], v[count:], kv, layer.scale))
        if not parts:
            return q.new_empty(0, layer.heads * layer.head_dim)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(
            tokens, layer.heads * layer.head_dim
        )
