"""Small kernels: the table of functions that layers bind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Route(Protocol):
    """A gate in one call: scores, choice and weights."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        k: int,
        groups: int,
        topk_groups: int,
        renormalize: bool,
        scale: float,
        appended: int,
    ) -> tuple[Tensor, Tensor]:
        """x [T, H], weight [E, H] -> weights float32 [T, K + A], ids int32 [T, K + A].

        With bias float32 [E] a sigmoid gate, softmax otherwise; scores accumulate in float32. The A
        = ``appended`` columns behind the K chosen are experts E to E + A - 1 with weight 1: shared
        experts that ride along.
        """
        ...


class SignallingRoute(Protocol):
    """As ``Route``, for experts that were started before it."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        k: int,
        groups: int,
        topk_groups: int,
        renormalize: bool,
        scale: float,
        appended: int,
        begun: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The same result, and ``begun`` (int32, of ``StartedExperts``) has 1 in front as soon as x
        may be read; not of 4 tokens or fewer, for which nobody starts experts."""
        ...


class Ops(Protocol):
    """Small kernels bound on layers at build: a table of callables, pure. References stand in
    ``kernels/``.

    Attributes:
        rms_norm: (x [..., N], weight [N], eps) -> y.
        add_rms_norm: (x, residual, weight, eps) -> (normed, residual + x).
        adds_parts: x of ``add_rms_norm``, and of its fused variants, may be ``Parts``.
        silu_and_mul: x [..., 2I] -> silu(first half) * second half.
        rope_table: (dim, context, theta, scaling, max_positions) -> float32 [context or more, dim],
            cosines then sines.
        rope_at: (table, positions int64 [T], interleaved) -> whatever ``rope`` needs; once a step,
            opaque to layers.
        rope: (q [T, H, R], k [T, G, R], what rope_at returned) -> rotated (q, k).
        topk_softmax: (logits float32 [T, E], k, groups, topk_groups, renormalize, scale) -> weights
            float32 [T, K], ids int64 [T, K].
        topk_sigmoid: (logits, bias float32 [E], k, groups, topk_groups, renormalize, scale) -> the
            same.
        fused: (producer, input format) -> the producer's variant that hands over that format as a
            ``Quantized``; producers are names of this table, and "cast" for plain activations.
        route: the whole gate in one call, or None.

    A table may have ``route_signalling: SignallingRoute | None`` too; without one, no experts are
    started early.
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
