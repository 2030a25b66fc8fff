"""The KV pool of a draft with attention of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from glowplug.core.protocols import AttentionBackend, Limits
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.kv_pool import KVPool


class OwnCache:
    """A KV pool with the pages of the target's, and the same page table and KV slots.

    What a sequence finds in the target's pool after a prefix hit, a preemption or a chunk, it finds
    here, too.
    """

    _attention: AttentionBackend
    _hidden: int
    _pool: KVPool

    def bind(self, context: BuildContext) -> None:
        """Bind the attention of the draft's build context."""
        self._attention = context.attention
        self._hidden = context.facts.hidden_size
        self._device = context.worker.device

    def reserve(self, limits: Limits) -> None:
        """Make the pool and give it to the draft's attention. ``limits``: those of the target."""
        self._pool = KVPool(self._attention.kv_layout(), limits.num_pages, self._device)
        self._attention.reserve(replace(limits, kv=self._pool.layers, hidden=self._hidden))

    def page_states(self) -> Mapping[str, Tensor]:
        """Return the tensors of the pool; see ``protocols.PageStates``."""
        return {
            f"draft {layer}.{name}": tensor
            for layer, entries in enumerate(self._pool.layers)
            for name, tensor in entries.items()
        }
