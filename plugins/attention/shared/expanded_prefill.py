"""Attention of prefill rows over expanded keys, for the GPU backends of latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glowplug.core.protocols import MlaLayer
from glowplug.plugins.attention.shared.prefill_calls import RaggedCall, RaggedRows

Expand = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
Keys = tuple[Tensor, ...]
#: function of a range of the prefill tokens -> their keys and values, as ``keys_of`` returns them
OwnKeys = Callable[[slice], Keys]


class ExpandedPrefill:
    """The calls of ragged attention of a step's prefill rows, and their merged results.

    A backend implements ``prefill``, or ``plan_prefill`` and ``attend_ragged``, or ``keys_of`` and
    ``attend_keys``.
    """

    _kernels: Any  #: module with the function ``gather``
    _expand: Expand
    _merge_into: Callable[[Tensor, Tensor, Tensor, Tensor], None]

    def plan_prefill(self, ragged: list[RaggedRows]) -> None:
        """Prepare ``attend_ragged`` for all calls of the step's prefill rows, ``ragged``."""

    def attend_ragged(
        self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor
    ) -> Tensor:
        """Compute one planned call of ragged attention, here by :meth:`prefill`.

        A subclass whose library plans its calls itself overrides this method. Arguments and result
        as in :meth:`prefill`; ``call`` has the lengths of the rows and the mask.
        """
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
        """Compute multi-head attention of rows of different lengths (ragged), whose tokens adjoin.

        q, k and v may be strided in all dimensions but the last.

        Args:
            q: Queries, [n, H, nope + rope].
            k: Keys, [m, H, nope + rope].
            v: Values, [m, H, v_dim].
            q_starts: Prefix sums of the rows' numbers of queries, int32 [rows + 1] on the device.
            k_starts: Prefix sums of the rows' numbers of keys, int32 [rows + 1] on the device.
            max_q: Largest number of queries of a row.
            max_k: Largest number of keys of a row.
            scale: Factor by which the scores are multiplied.
            causal: Whether a row's last query sees all keys and each query before it one key less.
            out: Written, [n, H, v_dim].

        Returns:
            The log-sum-exp (natural logarithm) of each query's scores, float32 [n, H].
        """
        raise NotImplementedError

    def attend_rows(
        self,
        rows: RaggedRows,
        query: Tensor,
        own: Callable[[], Keys],
        kv: Tensor,
        layer: MlaLayer,
        out: Tensor,
    ) -> None:
        """Compute the attention of one group of prefill rows, merging the results of its calls.

        Args:
            rows: The rows and their calls.
            query: Queries of the rows, [n, H, nope + rope].
            own: Returns the keys and values of the same tokens.
            kv: The layer's cache.
            layer: The layer's weights and sizes.
            out: Written, [n, H, v_dim].
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
        self,
        call: RaggedCall,
        query: Tensor,
        own: Callable[[], Keys],
        kv: Tensor,
        layer: MlaLayer,
        out: Tensor,
    ) -> Tensor:
        """Compute the attention of one call into ``out`` and return its log-sum-exp.

        Arguments as in :meth:`attend_rows`; the result is that of :meth:`prefill`.
        """
        if call.kv_slots is None:
            return self.attend_keys(call, query, own(), layer, out)
        cached = self._kernels.gather(kv, call.kv_slots, query.dtype)
        return self.attend_keys(call, query, self.keys_of(cached, layer), layer, out)

    def keys_of(self, entries: Tensor, layer: MlaLayer) -> Keys:
        """Expand cache entries [n, lora + rope] to the tensors that ``attend_keys`` reads.

        Here these are the keys [n, H, nope + rope] and the values [n, H, v_dim].
        """
        return self._expand(entries, layer.w_kv, layer.nope_dim)

    def attend_keys(
        self,
        call: RaggedCall,
        query: Tensor,
        keys: Keys,
        layer: MlaLayer,
        out: Tensor,
    ) -> Tensor:
        """Compute one call over expanded keys into ``out``, and return its log-sum-exp.

        Args:
            call: The call.
            query: Queries, [n, H, nope + rope].
            keys: Result of ``keys_of``.
            layer: The layer's weights and sizes.
            out: Written, [n, H, v_dim].

        Returns:
            float32 [n, H].
        """
        k, v = keys
        return self.attend_ragged(call, query, k, v, layer.scale, out)
