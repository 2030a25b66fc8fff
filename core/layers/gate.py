"""The gate of a mixture of experts, which chooses the experts of each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.core.facts.decoder_names import MATRICES, PUBLISHED
from glowplug.core.layers.module import Module, Target
from glowplug.core.protocols import RouteSettingReady, WeightTarget
from glowplug.core.protocols.build_context import BuildContext


@dataclass(frozen=True)
class MoeSizes:
    """Sizes and routing of one MoE layer.

    Attributes:
        hidden: size of the hidden states.
        width: intermediate size of a routed expert.
        experts: number of routed experts.
        topk: routed experts chosen for each token.
        shared: intermediate size of the shared expert; 0: there is none.
        sigmoid: True: V3's gate, sigmoid with a correction bias; False: softmax.
        groups: number of expert groups; 1: no groups.
        topk_groups: groups from which experts are chosen; 1 without groups.
        renormalize: divide the chosen weights by their sum.
        scale: factor on the weights.
        names: names of an expert's gate, up and down projections in the checkpoint; those of the
            shared expert have the same names.
        router: name of the gate's module within the layer.
        container: name of the module within the layer that holds the routed experts by number.
        shared_name: name of the shared expert's module within the layer.
    """

    hidden: int
    width: int
    experts: int
    topk: int
    shared: int
    sigmoid: bool
    groups: int = 1
    topk_groups: int = 1
    renormalize: bool = False
    scale: float = 1.0
    names: tuple[str, str, str] = MATRICES
    router: str = "gate"
    container: str = "experts"
    shared_name: str = PUBLISHED.shared


class Gate(Module):
    """The gate: it scores experts in float32 and chooses some for each token."""

    def __init__(self, context: BuildContext, name: str, sizes: MoeSizes) -> None:
        self.name = name
        self.sizes = sizes
        device = context.worker.device
        stored = context.facts.tensors.get(f"{name}.weight")
        exact = torch.device(device).type != "cpu" and (stored or context.facts).dtype == "bfloat16"
        # NOTE: products of bfloat16 numbers are exact in float32, so a gate stored in bfloat16
        # loses nothing by staying so.
        self.weight = torch.empty(
            sizes.experts,
            sizes.hidden,
            dtype=torch.bfloat16 if exact else torch.float32,
            device=device,
        )
        self.bias = torch.zeros(sizes.experts, device=device) if sizes.sigmoid else None
        #: experts of the fused shared expert, which are chosen for every token; 0: not fused
        self.fused_shared = 0
        self._softmax = context.ops.topk_softmax
        self._sigmoid = context.ops.topk_sigmoid
        self._route = context.ops.route
        self._route_ready: RouteSettingReady | None = getattr(
            context.ops, "route_and_set_ready", None
        )

    @property
    def sets_ready(self) -> bool:
        """True: ``forward`` can set a ready flag (``ready``)."""
        return self._route_ready is not None

    def own_targets(self) -> Iterator[WeightTarget]:
        """Yield the targets of the weight and the correction bias."""
        yield Target(f"{self.name}.weight", tuple(self.weight.shape), self.weight)
        if self.bias is not None:
            yield Target(f"{self.name}.e_score_correction_bias", tuple(self.bias.shape), self.bias)

    def forward(self, x: Tensor, ready: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            x: plain activations [T, hidden].
            ready: ready flag of ``StartedExperts``, only for a gate that ``sets_ready``.

        Returns:
            weights float32 [T, K] and expert ids int [T, K], the fused shared expert's included.
        """
        s = self.sizes
        if self._route is not None:
            given = (
                x,
                self.weight,
                self.bias,
                s.topk,
                s.groups,
                s.topk_groups,
                s.renormalize,
                s.scale,
                self.fused_shared,
            )
            if ready is None:
                return self._route(*given)
            assert self._route_ready is not None, (
                "experts start early only with a gate that sets a ready flag"
            )
            return self._route_ready(*given, ready)
        logits = F.linear(x.float(), self.weight.float())
        if self.bias is not None:
            return self._sigmoid(
                logits, self.bias, s.topk, s.groups, s.topk_groups, s.renormalize, s.scale
            )
        return self._softmax(logits, s.topk, s.groups, s.topk_groups, s.renormalize, s.scale)
