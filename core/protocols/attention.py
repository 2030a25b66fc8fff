"""Protocols of attention backends and of the layers that call them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.protocols.worker import Limits
from glowplug.core.step.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


class RopeRows(NamedTuple):
    """The rotary factors of a step's tokens, for kernels that apply RoPE themselves.

    ``Ops.rope_at`` returns them.

    Attributes:
        cos_sin: float32 [T, R], cosines then sines.
        interleaved: True: pairs of adjacent elements are rotated; False: element i and R / 2 + i.
    """

    cos_sin: Tensor
    interleaved: bool


class MlaLayer(Protocol):
    """One MLA layer, with the fields that a backend reads.

    All tensors are in the compute dtype, and heads are those of this rank.

    Attributes:
        index: layer number in the KV pool.
        heads: number of heads.
        nope_dim: size of a head's part without RoPE.
        rope_dim: size of the rotary part.
        v_dim: size of a head's values.
        lora_rank: size of the latent.
        scale: softmax scale, YaRN's mscale included.
        w_uk: [H, nope_dim, lora_rank]; maps q_nope to the latent space.
        w_uv: [H, lora_rank, v_dim]; maps the latent output to values.
        w_kv: [H, nope_dim + v_dim, lora_rank], contiguous: for each head the rows of w_uk, then
            those of w_uv's transpose.
        kv_stored: both weights in block FP8, for each head the rows of W_UK's transpose before
            those of W_UV's: E4M3 [H, nope_dim + v_dim, lora_rank] and float32 scales [H, (nope_dim
            + v_dim) / 128, lora_rank / 128]. None if weights are stored otherwise, or if a head is
            not a whole number of blocks.
    """

    index: int
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    lora_rank: int
    scale: float
    w_uk: Tensor
    w_uv: Tensor
    w_kv: Tensor
    kv_stored: tuple[Tensor, Tensor] | None

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents to the keys and values of every head, for attention without absorption.

        Args:
            latent: [N, lora_rank].

        Returns:
            k_nope [N, H, nope_dim] and v [N, H, v_dim].
        """
        ...


class MhaLayer(Protocol):
    """One multi-head or grouped-query layer, with the fields that a backend reads.

    Attributes:
        index: layer number in the KV pool.
        heads: query heads on this rank.
        kv_heads: key and value heads on this rank.
        head_dim: size of a head.
        scale: softmax scale.
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


class ProjectedMla(Protocol):
    """A variant of ``AttentionBackend.mla`` that also applies the latent's norm and RoPE.

    Norm, RoPE and the store in the cache may then be one kernel.
    """

    def __call__(
        self,
        query: Tensor,
        compressed: Tensor,
        norm_weight: Tensor,
        eps: float,
        at: RopeRows,
        layer: MlaLayer,
    ) -> Tensor:
        """Norm the latent, apply RoPE, store both in the cache and attend.

        Args:
            query: [T, H, nope_dim + rope_dim]; may be overwritten.
            compressed: [T, lora_rank + rope_dim]: the latent, then the key's rotary part. This and
                ``query`` may be strided between tokens.
            norm_weight: weight of the latent's RMS norm, [lora_rank].
            eps: epsilon of the norm.
            at: rotary factors of the tokens.
            layer: the calling layer.

        Returns:
            [T, H * v_dim].
        """
        ...


class PreparedMla(Protocol):
    """``AttentionBackend.mla_projected`` in two parts, of which the first may be captured.

    Both are methods of a backend that has ``mla_projected``.
    """

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
        """Norm the latent, apply RoPE, store both in the cache, and expand each token's own keys.

        Each token is treated alone, by work on the device that depends on no planned step, so the
        call may be captured for more tokens than a step has. Padding has KV slot 0.

        Args:
            query: as in ``ProjectedMla``, as all arguments but ``kv_slots``.
            kv_slots: KV slots of the tokens, int64 [T].

        Returns:
            The tensors [T, ...] that ``attend_prepared`` reads; the first has the dtype of the
            result.
        """
        ...

    def attend_prepared(self, layer: MlaLayer, *rows: Tensor) -> Tensor:
        """Attend for the tokens of the planned step.

        Args:
            layer: the calling layer.
            rows: the results of ``prepare_mla`` for these tokens, [T, ...] each.

        Returns:
            [T, H * v_dim].
        """
        ...


class AttentionBackend(Protocol):
    """The KV cache of all layers and the attention over it.

    Further methods are optional. ``prepare_mla`` and ``attend_prepared`` (:class:`PreparedMla`)
    divide ``mla_projected``, so that graphs of steps with prompts include the first part of it.
    ``plans_on_device(first_key: int) -> bool`` returns whether ``plan_step`` of captured decoding
    rows, of batches with this ``Batch.first_key``, needs no work of the host in a replay: it
    enqueues only device work on the batch's tensors, or none, and can be captured. All passes of a
    draft are then captured as one graph, in which each pass is planned, with a key of its own,
    before it runs.

    Attributes:
        mla_projected: called by MLA layers in place of ``mla`` if ``Ops.rope_at`` returns
            ``RopeRows``; None: never.
    """

    mla_projected: ProjectedMla | None

    def kv_layout(self) -> KVLayout:
        """Return the layout of the KV cache; called before ``reserve``.

        It is ``plan.kv_layout(entries)`` with the function that the offers declare as
        ``kv_entries``. The layers of a draft follow the model's in the same pool. A layout that
        the plan was not sized for stops the start.
        """
        ...

    def reserve(self, limits: Limits) -> None:
        """Bind ``limits.kv`` as the cache and, in the first call, allocate all other buffers.

        These other buffers take ``AttentionOffers.reserves`` bytes.
        """
        ...

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        """Prepare a step on the host and enqueue its copies to the device.

        The planned step is enqueued before the next call, on the same stream. So every call may
        write to the same buffers.

        In a captured step, ``batch`` is the graph's own padded batch, whose device tensors are the
        same in capture and in every replay. All other tensors that captured kernels read must be in
        persistent buffers. The values that a call writes there for a graph must stay unchanged
        until that graph is replayed.

        Args:
            batch: the step.
            graph: key of the graph that the step will be replayed from, the same object in every
                step; None for an eager step.
        """
        ...

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        """Store the keys of a step's tokens in the cache and run MLA attention.

        RoPE has been applied, and the latent is normed.

        Args:
            q_nope: [T, H, nope_dim].
            q_rope: [T, H, rope_dim].
            latent: [T, lora_rank].
            k_rope: [T, rope_dim].
            layer: the calling layer.

        Returns:
            [T, H * v_dim].
        """
        ...

    def store_mla(self, latent: Tensor, k_rope: Tensor, kv_slots: Tensor, layer: MlaLayer) -> None:
        """Store keys in the cache without attention; no ``plan_step`` is needed.

        Args:
            latent: [T, lora_rank].
            k_rope: [T, rope_dim].
            kv_slots: KV slots of the tokens (the slot mapping), int64 [T].
            layer: the calling layer.
        """
        ...

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: MhaLayer) -> Tensor:
        """Store the keys and values of a step's tokens in the cache and run attention.

        RoPE has been applied.

        Args:
            q: [T, H, head_dim].
            k: [T, kv_heads, head_dim].
            v: [T, kv_heads, head_dim].
            layer: the calling layer.

        Returns:
            [T, H * head_dim].
        """
        ...

    def store_mha(self, k: Tensor, v: Tensor, kv_slots: Tensor, layer: MhaLayer) -> None:
        """Store keys and values in the cache without attention; no ``plan_step`` is needed.

        Args:
            k: [T, kv_heads, head_dim], with RoPE applied.
            v: [T, kv_heads, head_dim].
            kv_slots: KV slots of the tokens (the slot mapping), int64 [T].
            layer: the calling layer.
        """
        ...

    def move_entries(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        """Copy cache entries of decoding rows to other slots of the same rows.

        Called only if the backend offers ``tree``: after a verify step it moves the entries of the
        accepted tokens of each row together. A row's moves take effect in ascending order of
        the second index. The call needs no ``plan_step``, may be captured, and must not wait for
        the device.

        Args:
            sources: KV slots to read, int64 [D, S].
            targets: KV slots to write, int64 [D, S]. An entry whose two slots are equal is not
                touched. Of the others of a row, the positions of sources and of targets ascend,
                and no target is behind its source.
            layers: consecutive numbers of layers in the KV pool.
        """
        ...
