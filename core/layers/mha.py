"""Multi-head and grouped-query attention layers around the backend that owns the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glowplug.core.facts.decoder_names import PUBLISHED, DecoderNames
from glowplug.core.layers.attention import output_projection
from glowplug.core.layers.linear import Linear, Part, Terms
from glowplug.core.layers.module import Module
from glowplug.core.layers.norm import RmsNorm
from glowplug.core.protocols.build_context import BuildContext


class MhaAttention(Module):
    """Multi-head or grouped-query attention; also the ``MhaLayer`` of its backend."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        index: int,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm_eps: float | None = None,
        inputs: int | None = None,
        names: DecoderNames = PUBLISHED,
    ) -> None:
        """Build the projections.

        Args:
            bias: the projections to queries, keys and values have biases.
            out_bias: the output projection has a bias; None: as ``bias`` states.
            qk_norm_eps: epsilon of RMS norms of each head's query and key before RoPE; None: no
                norms.
            inputs: size of the layer's input, None for ``hidden``.
            names: ``projections`` and ``qk_norms`` name the modules in the checkpoint.
        """
        self.index = index
        self.scale = scale
        self.head_dim = head_dim
        self._bind(context)
        paths = _paths(name, names)
        parts = _grouped_parts(context, paths, heads, kv_heads, head_dim, bias)
        self.qkv = Linear(context, f"{name}.qkv_proj", inputs or hidden, parts)
        self._split = [size // head_dim for size in self.qkv.outputs]
        self.heads, self.kv_heads = self._split[:2]
        biased = bias if out_bias is None else out_bias
        self.o_proj = output_projection(context, paths[3], heads, head_dim, hidden, biased)
        self.input_format = self.qkv.input_format
        self._norms = _norms(context, paths[4:], head_dim, qk_norm_eps)

    def _bind(self, context: BuildContext) -> None:
        """Bind the functions that ``forward`` calls."""
        self._backend = context.attention
        self._mha = context.attention.mha
        self._rope = context.ops.rope
        self._at_split_point = context.split_points.call

    def forward(self, x: Any, at: object) -> Terms:
        """Run the layer and fill the cache: x [T, hidden] -> [T, hidden].

        Args:
            x: [T, hidden], plain or in ``input_format``.
            at: the step's RoPE rows.
        """
        q, k, v = self._projected(x)
        q, k = self._rope(q, k, at)
        return self.o_proj.forward_in_norm(
            self._at_split_point(self._attend, (q, k, v), self.heads * self.head_dim)
        )

    def fill(self, x: Any, at: object, kv_slots: Tensor) -> None:
        """Store the keys and values of x in the cache, without attention.

        Args:
            x: [T, hidden], plain or in ``input_format``.
            at: the step's RoPE rows.
            kv_slots: KV slots of the tokens, int64 [T].
        """
        _, k, v = self._projected(x)
        self._backend.store_mha(self._rope(k[:, :0], k, at)[1], v, kv_slots, self)

    def _projected(self, x: Any) -> tuple[Tensor, ...]:
        """Return queries, keys and values of x, each [T, heads, head_dim]."""
        rows = self.qkv.forward(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = torch.split(rows, self._split, dim=1)
        if self._norms:
            q, k = (_by_head(norm, x) for norm, x in zip(self._norms, (q, k), strict=True))
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call the backend with rotated queries and keys."""
        return self._mha(q, k, v, self)


def _paths(name: str, names: DecoderNames) -> list[str]:
    """Return the module paths of the four projections, then of the norms of queries and keys."""
    return [f"{name}.{part}" for part in (*names.projections, *names.qk_norms)]


def _norms(
    context: BuildContext, names: Sequence[str], head_dim: int, eps: float | None
) -> list[RmsNorm]:
    """Return the norms of queries and of keys; none without ``eps``."""
    if eps is None:
        return []
    return [RmsNorm(context, name, head_dim, eps) for name in names]


def _by_head(norm: RmsNorm, x: Tensor) -> Tensor:
    """Return x [T, H, head_dim] with a norm over each head."""
    found: Tensor = norm.forward(x.reshape(-1, x.shape[-1]))
    return found.view(x.shape)


def _grouped_parts(
    context: BuildContext,
    names: Sequence[str],
    heads: int,
    kv_heads: int,
    head_dim: int,
    bias: bool,
) -> list[Part]:
    """Return the parts of the projection to queries, keys and values of grouped-query attention.

    Args:
        names: module paths of the projections, those to queries, keys and values first.
    """
    query, key, value = names[:3]
    shard = context.parallel.shard("heads", query, heads)
    held = kv_heads_of(shard.start, shard.size, heads, kv_heads)
    return [
        Part(query, heads * head_dim, "heads", head_dim, bias),
        *(Part(name, kv_heads * head_dim, "heads", head_dim, bias, held) for name in (key, value)),
    ]


def kv_heads_of(first: int, count: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Return (first, count) of the KV heads that some query heads read.

    Ranks whose query heads share a KV head all hold it.

    Args:
        first: number of the first query head.
        count: number of query heads.
        heads: query heads of the layer.
        kv_heads: KV heads of the layer.
    """
    start = first * kv_heads // heads
    return start, -(-(first + count) * kv_heads // heads) - start
