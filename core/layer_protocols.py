"""What a factory receives, and the contracts of the slots that layers call: attention, quantization, small kernels.

Part of ``core/protocols.py``, which names everything here too. Shapes: T tokens, H heads, D decoding rows, W width.
Importing this module imports torch only for type checking.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from glowplug.core.batch import Batch
from glowplug.core.memory.layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.protocols import Collectives


# ---- what a factory receives --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """The rank a factory builds for. ``device``: torch device string; ``dtype``: torch dtype of activations."""

    rank: int = 0
    ranks: int = 1
    device: str = "cpu"
    dtype: Any = None
    coordinates: Mapping[str, int] = field(default_factory=dict)  #: mesh axis -> this rank's index
    clock: Callable[[], float] = time.monotonic  #: seconds; in the loop the same on every rank (``RankClock``)
    rendezvous: str = ""  #: where ranks meet (``init_method`` of torch.distributed); "" for one rank
    collectives: Collectives | None = None  #: what parallel strategies exchange through; they are given it, others not


@dataclass(frozen=True)
class Limits:
    """Upper bounds for ``reserve``. ``kv``: one mapping entry name -> tensor [pages * page_size, *shape] a layer.

    ``rows``: those of the sequence table and one behind them that no sequence has: rows added to a captured step to
    fill it up work on it. ``hidden``: size of the target's hidden states.
    """

    rows: int
    step_tokens: int
    context: int
    page_size: int
    num_pages: int
    width: int
    vocab: int
    kv: tuple[Mapping[str, Tensor], ...] = ()
    hidden: int = 0


# ---- attention ----------------------------------------------------------------------------------------------------


class RopeRows(NamedTuple):
    """What ``Ops.rope_at`` returns where kernels rotate: cos_sin float32 [T, R], cosines then sines."""

    cos_sin: Tensor
    interleaved: bool


class MlaLayer(Protocol):
    """What a backend needs from one MLA layer. All tensors in the compute dtype, heads local to this rank.

    Attributes:
        index: layer number in the KV pool.
        heads, nope_dim, rope_dim, v_dim, lora_rank: sizes.
        scale: softmax scale, YaRN's mscale included.
        w_uk: [H, nope_dim, lora_rank], takes q_nope into latent space.
        w_uv: [H, lora_rank, v_dim], takes the latent output to values.
        w_kv: [H, nope_dim + v_dim, lora_rank], contiguous: a head's rows of w_uk, then those of w_uv's transpose.
        kv_stored: both as block FP8 keeps them, a head's rows of W_UK's transpose before those of W_UV's: E4M3
            [H, nope_dim + v_dim, lora_rank] and float32 scales [H, (nope_dim + v_dim) / 128, lora_rank / 128]. None
            where weights are kept otherwise, or a head is not whole blocks.
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
        """latent [N, lora_rank] -> k_nope [N, H, nope_dim], v [N, H, v_dim]: the un-absorbed projection."""
        ...


class MhaLayer(Protocol):
    """What a backend needs from one multi-head (or grouped-query) layer."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


class ProjectedMla(Protocol):
    """As ``AttentionBackend.mla``, with the latent's norm and the rotation still to be done, so that they may be one
    kernel."""

    def __call__(self, query: Tensor, compressed: Tensor, norm_weight: Tensor, eps: float, at: RopeRows,
                 layer: MlaLayer) -> Tensor:
        """query [T, H, nope_dim + rope_dim] (may be overwritten), compressed [T, lora_rank + rope_dim]: latent, then
        the key's rotary part; both may be strided between tokens. Returns [T, H * v_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Attributes:
        mla_projected: what MLA layers call instead of ``mla`` where ops hand over ``RopeRows``; None: never.
    """

    mla_projected: ProjectedMla | None

    def kv_layout(self) -> KVLayout:
        """What it keeps in the cache. Called before ``reserve``."""
        ...

    def reserve(self, limits: Limits) -> None: ...

    def plan_step(self, batch: Batch, slot: object | None) -> None:
        """Host-side preparation for ``batch``; ``slot`` stands for the graph it will replay in, or None.

        With a slot, ``batch`` is the slot's own padded batch, whose device tensors are the same in capture and in every
        replay; whatever a captured kernel reads beside them must lie in buffers that belong to the slot.
        """
        ...

    def mla(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer) -> Tensor:
        """Store latent [T, lora_rank] and k_rope [T, rope_dim], attend, return [T, H * v_dim].

        q_nope [T, H, nope_dim], q_rope [T, H, rope_dim]; rope already applied, latent already normed.
        """
        ...

    def store_mla(self, latent: Tensor, k_rope: Tensor, slots: Tensor, layer: MlaLayer) -> None:
        """Store latent [T, lora_rank] and k_rope [T, rope_dim] at slots int64 [T]; no ``plan_step``, no attention."""
        ...

    def mha(self, q: Tensor, k: Tensor, v: Tensor, layer: MhaLayer) -> Tensor:
        """q [T, H, head_dim], k and v [T, kv_heads, head_dim]; stores k, v; returns [T, H * head_dim]."""
        ...


# ---- quantization -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearShape:
    """A (possibly fused) linear layer on this rank: y = x W^T, W [sum(outputs), inputs].

    Attributes:
        name: module path of the layer, e.g. "model.layers.3.self_attn.q_b_proj".
        parts: checkpoint names of the fused parts (module paths), one for a plain layer.
        outputs: rows of each part on this rank.
        inputs: columns on this rank.
        row_starts: first row of each part in the checkpoint's tensor (tensor parallel slices), 0 without sharding.
        col_start: first column in the checkpoint's tensor.
        full: (rows, columns) of each part in the checkpoint.
        bias: the parts carry biases.
        wide: float32 results are as welcome as those in the activation dtype.
    """

    name: str
    parts: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    row_starts: tuple[int, ...]
    col_start: int
    full: tuple[tuple[int, int], ...]
    bias: bool = False
    wide: bool = False


@dataclass(frozen=True)
class ExpertsShape:
    """Routed experts on this rank. Gate and up are fused: w13 [E, 2*inter, hidden], w2 [E, hidden, inter].

    ``prefix`` is the module path up to "experts"; checkpoint names are ``{prefix}.{e}.gate_proj.weight`` and so on.
    ``first``..``first + count`` are the experts held here; ``inter_start``/``inter`` the slice of their width.
    ``shared``: so many further experts of the same width follow them, which together are the shared expert
    ``shared_prefix`` (the slices of its width, in order).
    ``parts``: results may be ``Parts``.
    """

    prefix: str
    count: int
    first: int
    hidden: int
    inter: int
    inter_start: int
    inter_full: int
    total: int
    shared: int = 0
    shared_prefix: str = ""
    parts: bool = False


class WeightTarget(Protocol):
    """One checkpoint tensor that must be loaded: where it goes. Every target is stored exactly once.

    Attributes:
        name: checkpoint tensor name.
        shape: shape it must have in the checkpoint.
        index: slices of it that this rank needs.
        optional: may be absent (then ``store`` is not called).
        dtype: torch dtype name it must have in the checkpoint ("float8_e4m3fn"); None: any floating dtype of 16 bits
            or more.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    optional: bool
    dtype: str | None

    def store(self, value: Tensor) -> None:
        """Receive the sliced tensor, in the checkpoint's dtype, on the CPU or on the target's device (ready for the
        current stream). Copies it into its final place; who keeps it keeps more memory than its own, so keep a clone.
        """
        ...


class Quantized(NamedTuple):
    """Activations in a linear's ``input_format``. ``scales`` is None where the format keeps values already scaled."""

    values: Tensor
    scales: Tensor | None = None


class Parts(NamedTuple):
    """[T, hidden] that is still to be added up: rows [T * K, hidden], weighted already, and their experts' ids [T, K],
    or rows of another sum, all with ids of 0.

    The rows of negative ids do not count, and hold anything. Rows are of the activation dtype or float32; ids may be
    strided in the first dimension.
    """

    rows: Tensor
    ids: Tensor


class LinearMethod(Protocol):
    """How one linear layer keeps its weight and multiplies. Holds its own tensors.

    A method may have ``apply_parts(x) -> Tensor | Parts`` too: as ``apply``, for a norm that adds parts up.
    """

    #: what the producer may hand over as ``Quantized``: "plain" (nothing), "fp8_group128", "int8_token",
    #: "fp8_group128_values" (E4M3 values times their scale, in the activation dtype)
    input_format: str

    def targets(self) -> Iterator[WeightTarget]: ...

    def finalize(self) -> None:
        """After loading: fuse, transpose, dequantise into the form ``apply`` uses."""
        ...

    def apply(self, x: Tensor | Quantized) -> Tensor:
        """x [T, inputs] -> [T, sum(outputs)] in the activation dtype (or ``LinearShape.wide``), bias added."""
        ...

    def dense(self) -> Tensor:
        """The weight as [sum(outputs), inputs] in the compute dtype (MLA absorption needs kv_b's). After finalize."""
        ...


class StartedExperts(Protocol):
    """A layer's experts once x is there. The gate is called next, with ``begun`` (int32), whose first number it sets to
    1 as soon as it may read x; then ``finish``."""

    @property
    def begun(self) -> Tensor: ...

    def finish(self, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        """As ``ExpertsMethod.apply`` of the same x."""
        ...


class ExpertsMethod(Protocol):
    """How the routed experts of one layer keep their weights and multiply.

    A method may have ``start(x [T, hidden], width) -> StartedExperts | None`` too, for gates that choose ``width`` ids
    a token, shared experts' among them; None: nothing is gained by beginning before the gate has chosen.
    """

    input_format: str  #: as of ``LinearMethod``

    def targets(self) -> Iterator[WeightTarget]: ...

    def finalize(self) -> None: ...

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        """x [T, hidden], ids [T, K] (of experts held, -1: not here), weights float32 [T, K] -> [T, hidden].

        ids are int64, or int32 where ``Ops.route`` chose them. ``Parts`` only where ``ExpertsShape.parts`` allows it.
        """
        ...


class QuantizationScheme(Protocol):
    """Makes the methods of the modules it covers.

    Attributes:
        block: ranks split dimensions only at multiples of it.
        fuses_shared: its experts' methods take ``ExpertsShape.shared``.
    """

    block: int
    fuses_shared: bool

    def linear(self, shape: LinearShape) -> LinearMethod: ...

    def experts(self, shape: ExpertsShape) -> ExpertsMethod: ...

    def covers(self, module: str) -> bool:
        """Is this module quantized? If not, the model uses the unquantized scheme for it."""
        ...


# ---- small kernels --------------------------------------------------------------------------------------------------


class Route(Protocol):
    """A gate in one call: scores, choice and weights."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, k: int, groups: int, topk_groups: int,
                 renormalize: bool, scale: float, appended: int,
                 begun: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, H], weight [E, H] -> weights float32 [T, K + A], ids int32 [T, K + A].

        With bias float32 [E] a sigmoid gate, softmax otherwise; scores accumulate in float32. The A = ``appended``
        columns behind the K chosen are experts E to E + A - 1 with weight 1: shared experts that ride along.
        ``begun``: of ``StartedExperts``.
        """
        ...


class Ops(Protocol):
    """Small kernels bound on layers at build: a table of callables, pure. References stand in ``kernels/``.

    Attributes:
        rms_norm: (x [..., N], weight [N], eps) -> y.
        add_rms_norm: (x, residual, weight, eps) -> (normed, residual + x).
        adds_parts: x of ``add_rms_norm``, and of its fused variants, may be ``Parts``.
        silu_and_mul: x [..., 2I] -> silu(first half) * second half.
        rope_table: (dim, context, theta, scaling, max_positions) -> float32 [context or more, dim], cosines then sines.
        rope_at: (table, positions int64 [T], interleaved) -> whatever ``rope`` needs; once a step, opaque to layers.
        rope: (q [T, H, R], k [T, G, R], what rope_at returned) -> rotated (q, k).
        topk_softmax: (logits float32 [T, E], k, groups, topk_groups, renormalize, scale) -> weights float32 [T, K],
            ids int64 [T, K].
        topk_sigmoid: (logits, bias float32 [E], k, groups, topk_groups, renormalize, scale) -> the same.
        fused: (producer, input format) -> the producer's variant that hands over that format as a ``Quantized``;
            producers are names of this table, and "cast" for plain activations.
        route: the whole gate in one call, or None.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Any, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    adds_parts: bool
    silu_and_mul: Callable[[Tensor], Tensor]
    rope_table: Callable[[int, int, float, Mapping[str, Any] | None, int], Tensor]
    rope_at: Callable[[Tensor, Tensor, bool], object]
    rope: Callable[[Tensor, Tensor, object], tuple[Tensor, Tensor]]
    topk_softmax: Callable[[Tensor, int, int, int, bool, float], tuple[Tensor, Tensor]]
    topk_sigmoid: Callable[[Tensor, Tensor, int, int, int, bool, float], tuple[Tensor, Tensor]]
    fused: Mapping[tuple[str, str], Callable[..., Any]]
    route: Route | None
