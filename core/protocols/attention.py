"""Attention: what a backend is given by layers, and what it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.protocols.worker import Limits
from glowplug.core.step.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


class RopeRows(NamedTuple):
    """What ``Ops.rope_at`` returns where kernels rotate: cos_sin float32 [T, R], cosines then
    sines.
    """

    cos_sin: Tensor
    interleaved: bool


class MlaLayer(Protocol):
    """What a backend needs from one MLA layer. All tensors in the compute dtype, heads local to
    this rank.

    Attributes:
        index: layer number in the KV pool.
        heads, nope_dim, rope_dim, v_dim, lora_rank: sizes.
        scale: softmax scale, YaRN's mscale included.
        w_uk: [H, nope_dim, lora_rank], takes q_nope into latent space.
        w_uv: [H, lora_rank, v_dim], takes the latent output to values.
        w_kv: [H, nope_dim + v_dim, lora_rank], contiguous: a head's rows of w_uk, then those of
            w_uv's transpose.
        kv_stored: both as block FP8 keeps them, a head's rows of W_UK's transpose before those of
            W_UV's: E4M3 [H, nope_dim + v_dim, lora_rank] and float32 scales [H, (nope_dim + v_dim)
            / 128, lora_rank / 128]. None where weights are kept otherwise, or a head is not whole
            blocks.
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
        """latent [N, lora_rank] -> k_nope [N, H, nope_dim], v [N, H, v_dim]: the un-absorbed
        projection.
        """
        ...


class MhaLayer(Protocol):
    """What a backend needs from one multi-head (or grouped-query) layer."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


class ProjectedMla(Protocol):
    """As ``AttentionBackend.mla``, with the latent's norm and the rotation still to be done, so
    that they may be one kernel."""

    def __call__(
        self,
        query: Tensor,
        compressed: Tensor,
        norm_weight: Tensor,
        eps: float,
        at: RopeRows,
        layer: MlaLayer,
    ) -> Tensor:
        """query [T, H, nope_dim + rope_dim] (may be overwritten), compressed [T, lora_rank +
        rope_dim]: latent, then the key's rotary part; both may be strided between tokens. Returns
        [T, H * v_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Attributes:
    mla_projected: what MLA layers call instead of ``mla`` where ops hand over ``RopeRows``; None:
    never.
    """

    mla_projected: ProjectedMla | None

    def kv_layout(self) -> KVLayout:
        """What it keeps in the cache. Called before ``reserve``."""
        ...

    def reserve(self, limits: Limits) -> None:
        """Take ``limits.kv`` as the cache, and once what it needs beside it:
        ``AttentionOffers.reserves`` bytes.
        """
        ...

    def plan_step(self, batch: Batch, slot: object | None) -> None:
        """Host-side preparation for ``batch``; ``slot`` stands for the graph it will replay in, or
        None.

        What is planned is enqueued before the next call, on the same stream: plans may write to one
        place in turn.

        With a slot, ``batch`` is the slot's own padded batch, whose device tensors are the same in
        capture and in every replay; whatever a captured kernel reads beside them must lie in
        buffers that stay, and hold what the slot's last call put there until its replay.
        """
        ...

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        """Store latent [T, lora_rank] and k_rope [T, rope_dim], attend, return [T, H * v_dim].

        q_nope [T, H, nope_dim], q_rope [T, H, rope_dim]; rope already applied, latent already
        normed.
        """
        ...

    def store_mla(self, latent: Tensor, k_rope: Tensor, slots: Tensor, layer: MlaLayer) -> None:
        """Store latent [T, lora_rank] and k_rope [T, rope_dim] at slots int64 [T]; no
        ``plan_step``, no attention.
        """
        ...

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: MhaLayer) -> Tensor:
        """q [T, H, head_dim], k and v [T, kv_heads, head_dim]; stores k, v; returns [T, H *
        head_dim].
        """
        ...
