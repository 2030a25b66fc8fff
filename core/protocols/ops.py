"""Protocol of the small kernels: a table of functions that layers bind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Route(Protocol):
    """A whole gate in one call: scores, choice of experts and their weights."""

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
        fused_shared: int,
        /,
    ) -> tuple[Tensor, Tensor]:
        """Score all experts and choose k of them for each token.

        Scores accumulate in float32. With a bias the gate uses sigmoid scores, without one softmax.

        Args:
            x: activations [T, hidden].
            weight: weight of the gate [E, hidden].
            bias: score-correction bias of the experts, float32 [E], or None.
            k: number of experts to choose for each token.
            groups: number of expert groups.
            topk_groups: number of groups from which experts are chosen.
            renormalize: divide the chosen weights by their sum.
            scale: factor on the weights.
            fused_shared: number A of further experts that every token uses: the fused shared
                expert. They are experts E to E + A - 1, with weight 1, in the last A columns.

        Returns:
            weights float32 [T, k + A] and ids int32 [T, k + A].
        """
        ...


class RouteSettingReady(Protocol):
    """A ``Route`` that also sets the ready flag of experts that were started before it."""

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
        fused_shared: int,
        ready: Tensor,
        /,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of ``Route``, and set the ready flag as soon as x may be read.

        Args:
            ready: ready flag of ``StartedExperts``, int32; its first element is set to 1. It may
                stay unset in steps of very few tokens (``VECTOR_TOKENS_MAX`` in
                ``kernels/moe/route.py``), for which experts are never started early.
        """
        ...


class Ops(Protocol):
    """The small kernels, a table of pure functions that layers bind while they are built.

    Reference implementations are in ``kernels/``. A table may also have ``route_and_set_ready:
    RouteSettingReady | None``; without one, no experts are started early. It may have
    ``copy_small: (source, target)``, which enqueues a copy of a small tensor to pinned host memory.

    Attributes:
        rms_norm: (x [..., N], weight [N], eps) -> y.
        add_rms_norm: (x, residual, weight, eps) -> (normed, residual + x).
        adds_parts: True: x of ``add_rms_norm``, and of its fused variants, may be ``Parts``.
        silu_and_mul: x [..., 2I] -> silu(first half) * second half, [..., I].
        rope_table: (dim, context, theta, scaling, max_positions) -> float32 [context or more, dim],
            cosines then sines.
        rope_at: (table, positions int64 [T], interleaved) -> argument of ``rope``, opaque to
            layers; called once a step.
        rope: (q [T, H, R], k [T, G, R], result of ``rope_at``) -> rotated (q, k).
        topk_softmax: (logits float32 [T, E], k, groups, topk_groups, renormalize, scale) -> weights
            float32 [T, K], ids int64 [T, K].
        topk_sigmoid: (logits, bias float32 [E], k, groups, topk_groups, renormalize, scale) ->
            weights and ids as above.
        fused: (producer, input format) -> the producer's variant that returns ``Quantized`` in that
            format. Producers are names of this table, and "cast" for plain activations.
        route: the whole gate in one call; None: the table has no such kernel.
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
