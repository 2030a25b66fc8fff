"""Attention layers: projections, norms and RoPE around the backend that owns the cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from glowplug.core.layers.linear import Linear, Part, Terms
from glowplug.core.layers.module import Module
from glowplug.core.layers.norm import RmsNorm
from glowplug.core.protocols import RopeRows
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Ends
from glowplug.core.step.graph_pieces import SplitCall
from glowplug.core.step.to_device import rows_at

FP8_BLOCK = 128  #: rows and columns of a block with one scale in block FP8
#: epsilon of the two latent norms; published code does not read it from config.json
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class MlaSizes:
    """Dimensions of a multi-head latent attention layer (arXiv 2405.04434).

    Attributes:
        hidden: size of the hidden states.
        heads: number of heads.
        nope: size of a head's part without RoPE.
        rope: size of the rotary part.
        v: size of a head's values.
        kv_lora: size of the key-value latent.
        q_lora: size of the query latent; None: queries are projected directly.
        bias: True: the projections to latents and the output projection have biases.
        inputs: size of the layer's input; None: ``hidden``.
    """

    hidden: int
    heads: int
    nope: int
    rope: int
    v: int
    kv_lora: int
    q_lora: int | None
    bias: bool = False
    inputs: int | None = None


@dataclass(frozen=True)
class MlaNames:
    """Names of the modules of a latent attention layer in checkpoints.

    Attributes:
        query: projection to queries, if there is no query latent.
        query_down: projection to the query latent.
        query_norm: norm of the query latent.
        query_up: projection of the query latent to all heads.
        kv_down: projection to the key-value latent and the rotary part of keys.
        kv_norm: norm of the key-value latent.
        kv_up: projection of the key-value latent to all heads.
        output: projection of the heads' results.
    """

    query: str
    query_down: str
    query_norm: str
    query_up: str
    kv_down: str
    kv_norm: str
    kv_up: str
    output: str


class MlaAttention(Module):
    """Multi-head latent attention; also the ``MlaLayer`` of its backend."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        index: int,
        sizes: MlaSizes,
        scale: float,
        names: MlaNames,
    ) -> None:
        self.index = index
        self.scale = scale
        self.heads = context.parallel.shard("heads", name, sizes.heads).size
        self.nope_dim = sizes.nope
        self.rope_dim = sizes.rope
        self.v_dim = sizes.v
        self.lora_rank = sizes.kv_lora
        self._width = self.heads * sizes.v
        self._bind(context)
        self._add_projections(context, name, sizes, names)
        self.input_format = self.input_proj.input_format
        self._split = [self.input_proj.outputs[0], sizes.kv_lora, sizes.rope]
        self._halves = [self._split[0], sizes.kv_lora + sizes.rope]
        self._split_query = [sizes.nope, sizes.rope]

    def _bind(self, context: BuildContext) -> None:
        """Bind the backend's and the ops' functions that ``forward`` calls."""
        self._mla = context.attention.mla
        self._store = context.attention.store_mla
        self._projected = context.attention.mla_projected
        self._rope = context.ops.rope
        self._split_points = context.split_points
        self._prepare = getattr(context.attention, "prepare_mla", None)
        self._attend_prepared: Any = getattr(context.attention, "attend_prepared", None)

    def _add_projections(
        self, context: BuildContext, name: str, sizes: MlaSizes, names: MlaNames
    ) -> None:
        """Add the linear layers and norms, in the order of their weights."""
        self.input_proj = _mla_input(context, name, sizes, names)
        self.q_norm: RmsNorm | None = None
        if sizes.q_lora is not None:
            self.q_b = _by_heads(
                context,
                f"{name}.{names.query_up}",
                sizes.q_lora,
                sizes.heads,
                sizes.nope + sizes.rope,
            )
            self.q_norm = RmsNorm(
                context, f"{name}.{names.query_norm}", sizes.q_lora, LATENT_EPS, self.q_b
            )
        self.kv_norm = RmsNorm(context, f"{name}.{names.kv_norm}", sizes.kv_lora, LATENT_EPS)
        self.kv_b = _by_heads(
            context, f"{name}.{names.kv_up}", sizes.kv_lora, sizes.heads, sizes.nope + sizes.v
        )
        self.o_proj = output_projection(
            context, f"{name}.{names.output}", sizes.heads, sizes.v, sizes.hidden, sizes.bias
        )

    def finalize(self) -> None:
        """Split the up-projection's dense weight into W_UK and W_UV."""
        super().finalize()
        self._kv_weight = self.kv_b.dense().t()
        self.w_kv = self._kv_weight.t().view(self.heads, self.nope_dim + self.v_dim, self.lora_rank)
        self.w_uk = self.w_kv[:, : self.nope_dim]
        self.w_uv = self.w_kv[:, self.nope_dim :].transpose(1, 2)
        if self.w_kv.is_cpu:
            # NOTE: contiguous copies, because heads interleaved with a stride of several KB take
            # twice the time on a CPU.
            self.w_uk = self.w_uk.contiguous()
            self.w_uv = self.w_uv.contiguous()
        self.kv_stored = self._stored()

    def _stored(self) -> tuple[Tensor, Tensor] | None:
        """Return ``MlaLayer.kv_stored``: the up-projection in block FP8, divided by heads.

        None if it is not stored in block FP8, or if a head is not a whole number of blocks.
        """
        found = self.kv_b.stored_blocks()
        rows = self.nope_dim + self.v_dim
        if found is None or any(
            size % FP8_BLOCK for size in (self.nope_dim, self.v_dim, self.lora_rank)
        ):
            return None
        values, scales = found
        return (
            values.view(self.heads, rows, self.lora_rank),
            scales.view(self.heads, rows // FP8_BLOCK, self.lora_rank // FP8_BLOCK),
        )

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return k_nope [N, H, nope_dim] and v [N, H, v_dim] of latent [N, lora_rank].

        NOTE: it uses the dense weight, so that absorbed and expanded attention agree for any
        scheme.
        """
        both = latent.mm(self._kv_weight).view(-1, self.heads, self.nope_dim + self.v_dim)
        return both[..., : self.nope_dim], both[..., self.nope_dim :]

    def forward(self, x: Any, at: object) -> Terms:
        """Run the layer and fill the cache.

        Args:
            x: [T, hidden], plain or in ``input_format``.
            at: the step's RoPE rows.

        Returns:
            [T, hidden], or ``Parts`` of it.
        """
        if self._projected is not None and isinstance(at, RopeRows):
            first, compressed = self.input_proj.forward(x).split_with_sizes(self._halves, dim=-1)
            work, rows = self._projected_call(self._query(first), compressed, at)
            return self.o_proj.forward_parts(self._split_points.call(work, rows, self._width))
        first, latent, k_rope = self.input_proj.forward(x).split_with_sizes(self._split, dim=-1)
        q_nope, q_rope = self._query(first).split_with_sizes(self._split_query, dim=-1)
        q_rope, k_rope = self._rope(q_rope, k_rope.unsqueeze(1), at)
        rows = (q_nope, q_rope, self.kv_norm.forward(latent), k_rope.squeeze(1))
        return self.o_proj.forward_parts(self._split_points.call(self._attend, rows, self._width))

    def _projected_call(
        self, query: Tensor, compressed: Tensor, at: RopeRows
    ) -> tuple[SplitCall, tuple[Tensor, ...]]:
        """Return the call of the backend at the split point, and the rows that it takes.

        It is ``mla_projected``. While a pass is captured, ``prepare_mla`` runs here, as a part of
        the graph, and the call is ``attend_prepared`` if the backend has both.
        """
        kv_slots = self._split_points.kv_slots
        if kv_slots is None or self._prepare is None:
            work = partial(self._attend_projected, at.interleaved)
            return work, (query, compressed, at.cos_sin)
        rows = self._prepare(query, compressed, self.kv_norm.weight, LATENT_EPS, at, kv_slots, self)
        return partial(self._attend_prepared, self), rows

    def _attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        """Call the backend with rotated queries and keys."""
        return self._mla(q_nope, q_rope, latent, k_rope, self)

    def _attend_projected(
        self, interleaved: bool, query: Tensor, compressed: Tensor, cos_sin: Tensor
    ) -> Tensor:
        """Call the backend's variant that norms the latent and applies RoPE itself."""
        assert self._projected is not None
        return self._projected(
            query, compressed, self.kv_norm.weight, LATENT_EPS, RopeRows(cos_sin, interleaved), self
        )

    def _query(self, first: Tensor) -> Tensor:
        """Return queries [T, H, nope_dim + rope_dim] of the input projection's query part."""
        if self.q_norm is None:
            return first.view(-1, self.heads, self.nope_dim + self.rope_dim)
        return self.q_b.forward(self.q_norm.forward(first)).view(
            -1, self.heads, self.nope_dim + self.rope_dim
        )

    def fill(self, x: Any, at: object, kv_slots: Tensor) -> None:
        """Store the keys of x in the cache, without attention.

        Args:
            x: [T, hidden], plain or in ``input_format``.
            at: the step's RoPE rows.
            kv_slots: KV slots of the tokens, int64 [T].
        """
        self._fill(x, at, kv_slots)

    def _fill(self, x: Any, at: object, kv_slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store x's keys in the cache and return the input projection's three parts.

        Returns:
            The query part as projected, and the latent normed and k_rope rotated, as stored in the
            cache.
        """
        first, latent, k_rope = self.input_proj.forward(x).split_with_sizes(self._split, dim=-1)
        k_rope = k_rope.unsqueeze(1)
        rows = self.kv_norm.forward(latent), self._rope(k_rope[:, :0], k_rope, at)[1].squeeze(1)
        self._store(*rows, kv_slots, self)
        return first, *rows

    def forward_ends(
        self, x: Any, at: object, kv_slots: Tensor, ends: Ends, ends_at: object
    ) -> Terms:
        """Store the keys of all tokens, then attend for E end tokens only.

        ``AttentionBackend.plan_step`` has been called with the end tokens as E rows that decode one
        token each.

        Args:
            x: [T, hidden], plain or in ``input_format``.
            at: RoPE rows of all tokens.
            kv_slots: KV slots of all tokens, int64 [T].
            ends: the end tokens.
            ends_at: RoPE rows of the end tokens.

        Returns:
            [E, hidden], or ``Parts`` of it.
        """
        first, latent, k_rope = self._fill(x, at, kv_slots)
        first, latent, k_rope = (rows_at(part, ends.tokens) for part in (first, latent, k_rope))
        q_nope, q_rope = self._query(first).split_with_sizes(self._split_query, dim=-1)
        q_rope = self._rope(q_rope, q_rope[:, :0], ends_at)[0]
        return self.o_proj.forward_parts(self._mla(q_nope, q_rope, latent, k_rope, self))


def _mla_input(context: BuildContext, name: str, sizes: MlaSizes, names: MlaNames) -> Linear:
    """Return the projection of x to queries (or the query latent), KV latent and RoPE key."""
    head = sizes.nope + sizes.rope
    query = (
        Part(f"{name}.{names.query}", sizes.heads * head, "heads", head)
        if sizes.q_lora is None
        else Part(f"{name}.{names.query_down}", sizes.q_lora, "replicated", bias=sizes.bias)
    )
    compressed = sizes.kv_lora + sizes.rope
    kv = Part(f"{name}.{names.kv_down}", compressed, "replicated", bias=sizes.bias)
    inputs = sizes.inputs or sizes.hidden
    return Linear(context, f"{name}.input_proj", inputs, [query, kv])


def _by_heads(context: BuildContext, name: str, inputs: int, heads: int, size: int) -> Linear:
    """Return a projection with ``size`` outputs per head; ranks hold whole heads."""
    return Linear(context, name, inputs, [Part(name, heads * size, "heads", size)])


def output_projection(
    context: BuildContext, name: str, heads: int, size: int, outputs: int, bias: bool
) -> Linear:
    """Return the output projection, with ``size`` inputs per head; ranks hold whole heads."""
    part = Part(name, outputs, "replicated", bias=bias)
    return Linear(context, name, heads * size, [part], input_role="heads_row", input_unit=size)
