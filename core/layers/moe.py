"""Mixture of experts: gate, routed experts and shared expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.core.layers.linear import (
    FORMAT_PLAIN,
    Both,
    Terms,
    agreed_format,
    both_formats,
    caster,
)
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.module import Module, Target
from glowplug.core.protocols import (
    ExpertExchange,
    ExpertsMethod,
    ExpertsShape,
    PartialSum,
    Parts,
    Quantized,
    RouteSettingReady,
    StartedExperts,
    WeightTarget,
)
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Batch


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


Start = Callable[[Tensor, int], StartedExperts | None]


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


class Experts(Module):
    """The routed experts of this rank.

    Args:
        name: module path up to "experts".
        sizes: sizes of the layer.
        fused_shared: number of further experts that hold the fused shared expert; 0: not fused.
        shared_name: module path of the shared expert.
        parts: True: results may be ``Parts``.

    Attributes:
        first: number of the first expert on this rank.
        count: number of experts on this rank.
        total: number of experts of the layer.
        method: the experts' quantization method.
        partial: mesh axes over which the results have still to be summed.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: MoeSizes,
        fused_shared: int = 0,
        shared_name: str = "",
        parts: bool = False,
    ) -> None:
        held = context.parallel.shard("experts", name, sizes.experts)
        scheme = context.scheme_for(f"{name}.{held.start}.gate_proj")
        width = context.parallel.shard("expert_width", name, sizes.width, scheme.block)
        self.name = name
        self.first = held.start
        self.count = held.size
        self.total = sizes.experts
        self.method: ExpertsMethod = scheme.experts(
            ExpertsShape(
                prefix=name,
                count=held.size,
                first=held.start,
                hidden=sizes.hidden,
                inter=width.size,
                inter_start=width.start,
                inter_full=width.full,
                total=sizes.experts,
                fused_shared=fused_shared,
                shared_prefix=shared_name,
                parts=parts,
            )
        )
        self.input_format = self.method.input_format
        self.partial = tuple(dict.fromkeys(shard.axis for shard in (held, width) if shard.reduce))
        self.forward = self.method.apply

    def own_targets(self) -> Iterator[WeightTarget]:
        """Yield the targets of this rank's experts."""
        return self.method.targets()

    def elsewhere(self) -> Iterator[str]:
        """Yield the module paths of the experts of other ranks."""
        for expert in range(self.total):
            if not self.first <= expert < self.first + self.count:
                yield from (
                    f"{self.name}.{expert}.{part}" for part in ("gate_proj", "up_proj", "down_proj")
                )

    def finalize(self) -> None:
        """Convert the loaded weights into the form that the method computes with."""
        self.method.finalize()


class Moe(Module):
    """Routed experts plus shared expert.

    ``forward`` never waits for the device.

    Attributes:
        exchanges: True: the input is this rank's own attention tokens, and the result is complete.
            False: the input is the tokens that every rank computes.
        input_format: format of the input: "plain", or ``Both`` of plain and the experts' format.
    """

    def __init__(self, context: BuildContext, name: str, sizes: MoeSizes) -> None:
        self._collectives = context.collectives
        self.gate = Gate(context, f"{name}.gate", sizes)
        fused_shared = self._fused_shared_count(context, name, sizes)
        self.gate.fused_shared = fused_shared
        self._set_exchange(context, name, sizes)
        shared_name = f"{name}.shared_experts"
        separate = sizes.shared > 0 and not fused_shared
        self.experts = Experts(
            context,
            f"{name}.experts",
            sizes,
            fused_shared,
            shared_name if fused_shared else "",
            parts=self._gives_parts and not separate,
        )
        self.shared: Mlp | None = None
        if separate:
            self.shared = Mlp(context, shared_name, sizes.hidden, sizes.shared, reduce=False)
        # NOTE: experts that start before the gate has chosen could not wait for masked ids
        early = fused_shared > 0 and self.gate.sets_ready and not context.parallel.moves_tokens
        self._start: Start | None = getattr(self.experts.method, "start", None) if early else None
        self._set_input_format(context)

    def _set_exchange(self, context: BuildContext, name: str, sizes: MoeSizes) -> None:
        """Set the exchange of tokens between ranks, and which sums the next norm computes."""
        self._exchange = context.parallel.expert_exchange(name, sizes.experts)
        self.exchanges = self._exchange is not None
        stays = not (self.exchanges or context.parallel.moves_tokens)
        # the results go straight to the next norm, which sums them over the ranks
        self._in_norm = stays and context.sums_in_norm
        alone = context.worker.ranks == 1
        self._gives_parts = context.ops.adds_parts and (alone or self._in_norm)

    def _set_input_format(self, context: BuildContext) -> None:
        """Set ``input_format``, and the cast of plain activations to the experts' format.

        The gate reads plain activations; the experts' input format may be another one.
        """
        readers = [self.experts] if self.shared is None else [self.experts, self.shared]
        self._cast: Callable[[Tensor], Tensor] | None = caster(  # type: ignore[assignment]
            context.ops, *readers
        )
        both = both_formats(agreed_format(readers))
        produced = all((norm, both) in context.ops.fused for norm in ("rms_norm", "add_rms_norm"))
        self.input_format = both if produced and not self.exchanges else FORMAT_PLAIN

    @staticmethod
    def _fused_shared_count(context: BuildContext, name: str, sizes: MoeSizes) -> int:
        """Return the number of further experts that hold the shared expert; 0: it is not fused."""
        scheme = context.scheme_for(f"{name}.experts.0.gate_proj")
        together = (
            context.ops.route is not None
            and Moe._split_alike(context, name, sizes, scheme.block)
            and scheme.fused_shared
            and scheme is context.scheme_for(f"{name}.shared_experts.gate_proj")
        )
        return sizes.shared // sizes.width if together and sizes.shared % sizes.width == 0 else 0

    @staticmethod
    def _split_alike(context: BuildContext, name: str, sizes: MoeSizes, block: int) -> bool:
        """Return whether ranks split routed experts and the shared expert in the same way."""
        parallel = context.parallel
        held = parallel.shard("experts", f"{name}.experts", sizes.experts)
        width = parallel.shard("expert_width", f"{name}.experts", sizes.width, block)
        column = parallel.shard("column", f"{name}.shared_experts.gate_proj", sizes.shared, block)
        return (
            held.size == held.full
            and (width.parts, width.parts > 1 and width.axis)
            == (column.parts, column.parts > 1 and column.axis)
            and width.size * width.parts == width.full
        )

    def forward(self, x: Tensor | Both, batch: Batch | None = None) -> Terms:
        """Run the layer on x [T, hidden]; return [T, hidden], or terms that the next norm sums."""
        if isinstance(x, Both):
            weights, ids = self.gate.forward(x.plain)
            return self._mixed(x.cast, self._masked(ids, batch), weights)
        started = (
            None
            if self._start is None
            else self._start(x, self.gate.sizes.topk + self.gate.fused_shared)
        )
        if started is not None:
            weights, ids = self.gate.forward(x, started.ready)
            return self._summed(started.finish(ids, weights))
        weights, ids = self.gate.forward(x)
        ids = self._masked(ids, batch)
        if self._exchange is not None:
            return self._exchanged(self._exchange, x, ids, weights, batch)
        return self._mixed(x if self._cast is None else self._cast(x), ids, weights)

    def _masked(self, ids: Tensor, batch: Batch | None) -> Tensor:
        """Replace the routed experts of the step's padding by -1 in ``ids`` [T, K]."""
        padding = None if batch is None else batch.padding
        if padding is not None:
            mask = padding.own if self.exchanges else padding.gathered
            if mask is not None:
                ids[:, : self.gate.sizes.topk].masked_fill_(mask, -1)
        return ids

    def _mixed(self, cast: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Terms:
        """Run the routed and shared experts on ``cast`` and sum the results over ranks."""
        local = ids if self.experts.count == self.gate.sizes.experts else self._local(ids)
        y = self.experts.forward(cast, local, weights)
        if isinstance(y, Parts) or self.shared is None:
            return self._summed(y)
        shared = self.shared.forward(cast)
        assert isinstance(shared, Tensor), "the shared expert's terms are added here"
        if self.shared.down.partial == self.experts.partial:
            return self._summed(y.add_(shared))
        return self._sum(y, self.experts.partial).add_(self._sum(shared, self.shared.down.partial))

    def _exchanged(
        self, exchange: ExpertExchange, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch | None
    ) -> Tensor:
        """Run this rank's tokens through the experts of all ranks, by ``exchange``."""
        assert batch is not None, "an exchange needs the step's shape"
        sent, ids, weights = exchange.dispatch(x, ids, weights, batch)
        y = self.experts.forward(sent if self._cast is None else self._cast(sent), ids, weights)
        assert isinstance(y, Tensor), "an exchange takes sums, not ``Parts``"
        if self.shared is None:
            return exchange.combine(y)
        shared = self.shared.forward(x if self._cast is None else self._cast(x))
        assert isinstance(shared, Tensor), "the shared expert's terms are added here"
        return (
            exchange.combine(y, shared)
            if self.shared.down.partial
            else exchange.combine(y).add_(shared)
        )

    def _summed(self, y: Tensor | Parts) -> Terms:
        """Return y summed over the ranks, or as a term of the sum that the next norm computes."""
        axes = self.experts.partial
        if self._in_norm and len(axes) == 1:
            return PartialSum(y, axes[0])
        if isinstance(y, Parts):
            assert not axes, "``Parts`` are summed over the ranks by a norm only"
            return y
        return self._sum(y, axes)

    def _sum(self, y: Tensor, axes: tuple[str, ...]) -> Tensor:
        """All-reduce y over each of ``axes``."""
        for axis in axes:
            y = self._collectives.all_reduce(y, axis)
        return y

    def _local(self, ids: Tensor) -> Tensor:
        """Convert expert ids of the layer to ids on this rank; -1 for experts of other ranks."""
        local = ids - self.experts.first
        return local.masked_fill_((local < 0) | (local >= self.experts.count), -1)
