"""Base class of the multi-head attention backends for GPUs.

:class:`PagedMha` owns the KV cache entries and splits a step into decode rows and prefill rows. A
backend is a subclass with two kernels, both over the paged cache: ``decode`` and ``prefill``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glowplug.core.facts.kv_layout import KVLayout, head_entries
from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import Limits, MhaLayer, MlaLayer, ProjectedMla, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.mha.store import mha_store
from glowplug.plugins.attention.shared.entry_moves import entry_moves


class PagedMha:
    """Per-head attention over the cache entries ``k`` and ``v``, with the key heads of this rank.

    The keys of a step are stored before any row attends, so the kernels read keys only from the
    cache, in the cache's dtype.

    Attributes:
        follows: Whether every kernel waits for the kernel before it by itself (PDL, see
            ``kernels/launch/dependent_launch.py``). The first kernel may then start before the keys
            are stored.
    """

    mla_projected: ProjectedMla | None = None
    follows = False

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        facts = plan.facts.model
        self._plan = plan
        self._page_size = plan.sizes.page_size
        self._heads = facts.num_heads // axis_size("attn_tp", plan.mesh)
        self._kv_heads = plan.local_kv_heads
        self._head_dim = facts.head_dim
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._kv: tuple[Mapping[str, Tensor], ...] = ()
        self._moves = entry_moves(torch.device(worker.device))
        self._kv_slots: Tensor | None = None
        self._decode_tokens = 0

    # ---- implemented by subclasses ---------------------------------------------------------------

    def plan_decode(self, batch: Batch, graph: object | None, rows: int, width: int) -> None:
        """Prepare ``decode`` for the first ``rows`` rows of ``width`` tokens each.

        Part of ``plan_step``, called only when the step has decode rows. ``graph``: key of the
        captured graph to which the prepared tensors belong; None in an eager step.
        """
        raise NotImplementedError

    def decode(self, query: Tensor, kv: Mapping[str, Tensor], scale: float) -> Tensor:
        """Compute the attention of the decode rows over the layer's cache.

        A row's last query sees all keys of the row; each query before it sees one key less.

        Args:
            query: Queries of the decode tokens, [n, H, D].
            kv: The layer's cache entries ``k`` and ``v``.
            scale: Factor by which the scores are multiplied.

        Returns:
            [n, H, D].
        """
        raise NotImplementedError

    def plan_prefill(self, batch: Batch, first: int) -> None:
        """Prepare ``prefill`` for the rows from index ``first`` on.

        Part of ``plan_step``, called only when the step has prefill rows.
        """
        raise NotImplementedError

    def prefill(
        self, query: Tensor, k: Tensor, v: Tensor, kv: Mapping[str, Tensor], scale: float
    ) -> Tensor:
        """Compute the attention of the prefill rows.

        Args:
            query: Queries of the prefill tokens, [m, H, D].
            k: Keys of the same tokens, [m, K, D].
            v: Values of the same tokens, [m, K, D].
            kv: The layer's cache entries ``k`` and ``v``, which already hold the same keys and
                values.
            scale: Factor by which the scores are multiplied.

        Returns:
            [m, H, D].
        """
        raise NotImplementedError

    # ---- AttentionBackend ------------------------------------------------------------------------

    def kv_layout(self) -> KVLayout:
        return self._plan.kv_layout(head_entries)

    def reserve(self, limits: Limits) -> None:
        self._kv = limits.kv
        self._moves.reserve(limits.kv)

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        decodes = batch.num_decodes
        tokens = batch.decode_tokens
        self._kv_slots = batch.kv_slots
        self._decode_tokens = tokens
        if decodes:
            self.plan_decode(batch, graph, decodes, tokens // decodes)
        if decodes < batch.num_rows:
            self.plan_prefill(batch, decodes)

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        raise NotImplementedError("this backend offers kind mha only")

    def store_mla(self, latent: Tensor, k_rope: Tensor, kv_slots: Tensor, layer: MlaLayer) -> None:
        raise NotImplementedError("this backend offers kind mha only")

    def move_entries(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        self._moves.run(sources, targets, layers)

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: MhaLayer) -> Tensor:
        assert self._kv_slots is not None, "plan_step must be called first"
        kv = self._kv[layer.index]
        count = self._decode_tokens
        tokens = q.shape[0]
        mha_store(k, v, kv["k"], kv["v"], self._kv_slots, self.follows and count == tokens)
        outputs = [self.decode(q[:count], kv, layer.scale)] if count else []
        if count < tokens:
            outputs.append(self.prefill(q[count:], k[count:], v[count:], kv, layer.scale))
        if not outputs:
            return q.new_empty(0, layer.heads * layer.head_dim)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.view(tokens, layer.heads * layer.head_dim)

    def store_mha(self, k: Tensor, v: Tensor, kv_slots: Tensor, layer: MhaLayer) -> None:
        kv = self._kv[layer.index]
        mha_store(k, v, kv["k"], kv["v"], kv_slots, False)
