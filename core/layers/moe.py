"""Mixture of experts: gate, routed experts, shared expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.core.layers.linear import FORMAT_PLAIN, Both, agreed_format, both_formats, caster
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.module import Module, Target
from glowplug.core.protocols import (
    ExpertExchange,
    ExpertsMethod,
    ExpertsShape,
    Parts,
    Quantized,
    SignallingRoute,
    StartedExperts,
    WeightTarget,
)
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Batch


@dataclass(frozen=True)
class MoeSizes:
    """Routing and sizes of one mixture.

    ``sigmoid``: V3's gate with a correction bias, softmax otherwise. ``groups``/``topk_groups``: 1
    and 1 for no limit.
    ``shared``: width of the shared expert, 0 for none.
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
    """Scores experts in float32 and picks: ``forward(x [T, hidden]) -> weights float32 [T, K], ids
    int [T, K]``.
    """

    def __init__(self, context: BuildContext, name: str, sizes: MoeSizes) -> None:
        self.name = name
        self.sizes = sizes
        device = context.worker.device
        stored = context.facts.tensors.get(f"{name}.weight")
        exact = torch.device(device).type != "cpu" and (stored or context.facts).dtype == "bfloat16"
        # NOTE: products of bfloat16 numbers are exact in float32, so nothing is lost by leaving a
        # gate as it is stored.
        self.weight = torch.empty(
            sizes.experts,
            sizes.hidden,
            dtype=torch.bfloat16 if exact else torch.float32,
            device=device,
        )
        self.bias = torch.zeros(sizes.experts, device=device) if sizes.sigmoid else None
        self.appended = (
            0  #: shared experts chosen for every token, where they ride along with the routed ones
        )
        self._softmax = context.ops.topk_softmax
        self._sigmoid = context.ops.topk_sigmoid
        self._route = context.ops.route
        self._signalling: SignallingRoute | None = getattr(context.ops, "route_signalling", None)

    @property
    def signals(self) -> bool:
        """May ``forward`` be given ``begun``?"""
        return self._signalling is not None

    def own_targets(self) -> Iterator[WeightTarget]:
        yield Target(f"{self.name}.weight", tuple(self.weight.shape), self.weight)
        if self.bias is not None:
            yield Target(f"{self.name}.e_score_correction_bias", tuple(self.bias.shape), self.bias)

    def forward(self, x: Tensor, begun: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``begun``: of ``StartedExperts``, only for a gate that ``signals``."""
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
                self.appended,
            )
            if begun is None:
                return self._route(*given)
            assert self._signalling is not None, (
                "experts start early behind gates that signal alone"
            )
            return self._signalling(*given, begun)
        logits = F.linear(x.float(), self.weight.float())
        if self.bias is not None:
            return self._sigmoid(
                logits, self.bias, s.topk, s.groups, s.topk_groups, s.renormalize, s.scale
            )
        return self._softmax(logits, s.topk, s.groups, s.topk_groups, s.renormalize, s.scale)


class Experts(Module):
    """The routed experts of this rank. ``partial``: axes over which the results are still to be
    summed.

    ``shared``: experts behind them that hold the shared expert ``shared_name``. ``parts``: results
    may be ``Parts``.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: MoeSizes,
        shared: int = 0,
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
                shared=shared,
                shared_prefix=shared_name,
                parts=parts,
            )
        )
        self.input_format = self.method.input_format
        self.partial = tuple(dict.fromkeys(shard.axis for shard in (held, width) if shard.reduce))
        self.forward = self.method.apply

    def own_targets(self) -> Iterator[WeightTarget]:
        return self.method.targets()

    def elsewhere(self) -> Iterator[str]:
        for expert in range(self.total):
            if not self.first <= expert < self.first + self.count:
                yield from (
                    f"{self.name}.{expert}.{part}" for part in ("gate_proj", "up_proj", "down_proj")
                )

    def finalize(self) -> None:
        self.method.finalize()


class Moe(Module):
    """x [T, hidden], plain or ``Both`` -> routed experts + shared expert, [T, hidden], or ``Parts``
    of it that the next layer's norm adds up. It never waits for the device.

    ``exchanges``: x are this rank's own attention tokens, and the result is complete. Otherwise x
    are the tokens that every rank works on.
    """

    def __init__(self, context: BuildContext, name: str, sizes: MoeSizes) -> None:
        self.gate = Gate(context, f"{name}.gate", sizes)
        riding = self._riding(context, name, sizes)
        self.gate.appended = riding
        parts = (
            context.ops.adds_parts
            and context.worker.ranks == 1
            and (not sizes.shared or riding > 0)
        )
        self.experts = Experts(
            context,
            f"{name}.experts",
            sizes,
            riding,
            f"{name}.shared_experts" if riding else "",
            parts,
        )
        self.shared = (
            Mlp(context, f"{name}.shared_experts", sizes.hidden, sizes.shared, reduce=False)
            if sizes.shared and not riding
            else None
        )
        early = riding > 0 and self.gate.signals
        self._start: Start | None = getattr(self.experts.method, "start", None) if early else None
        readers = [self.experts] if self.shared is None else [self.experts, self.shared]
        self._cast: Callable[[Tensor], Tensor] | None = caster(context.ops, *readers)  # type: ignore[assignment]
        self._exchange = context.parallel.expert_exchange(name, sizes.experts)
        self.exchanges = self._exchange is not None
        # The gate reads plain activations; experts may want them in another format as well.
        both = both_formats(agreed_format(readers))
        produced = all((norm, both) in context.ops.fused for norm in ("rms_norm", "add_rms_norm"))
        self.input_format = both if produced and not self.exchanges else FORMAT_PLAIN
        self._collectives = context.collectives

    @staticmethod
    def _riding(context: BuildContext, name: str, sizes: MoeSizes) -> int:
        """As how many routed experts the shared expert is computed; 0: by itself."""
        scheme = context.scheme_for(f"{name}.experts.0.gate_proj")
        together = (
            context.worker.ranks == 1
            and context.ops.route is not None
            and scheme.fuses_shared
            and scheme is context.scheme_for(f"{name}.shared_experts.gate_proj")
        )
        return sizes.shared // sizes.width if together and sizes.shared % sizes.width == 0 else 0

    def forward(self, x: Tensor | Both, batch: Batch | None = None) -> Tensor | Parts:
        if isinstance(x, Both):
            weights, ids = self.gate.forward(x.plain)
            return self._mixed(x.cast, ids, weights)
        started = (
            None
            if self._start is None
            else self._start(x, self.gate.sizes.topk + self.gate.appended)
        )
        if started is not None:
            weights, ids = self.gate.forward(x, started.begun)
            return started.finish(ids, weights)
        weights, ids = self.gate.forward(x)
        if self._exchange is not None:
            return self._exchanged(self._exchange, x, ids, weights, batch)
        return self._mixed(x if self._cast is None else self._cast(x), ids, weights)

    def _mixed(self, cast: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        local = ids if self.experts.count == self.gate.sizes.experts else self._local(ids)
        y = self.experts.forward(cast, local, weights)
        if isinstance(y, Parts):
            return y
        if self.shared is None:
            return self._sum(y, self.experts.partial)
        shared = self.shared.forward(cast)
        if self.shared.down.partial == self.experts.partial:
            return self._sum(y.add_(shared), self.experts.partial)
        return self._sum(y, self.experts.partial).add_(self._sum(shared, self.shared.down.partial))

    def _exchanged(
        self, exchange: ExpertExchange, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch | None
    ) -> Tensor:
        assert batch is not None, "exchanges need the step's shape"
        sent, ids, weights = exchange.dispatch(x, ids, weights, batch)
        y = self.experts.forward(sent if self._cast is None else self._cast(sent), ids, weights)
        assert isinstance(y, Tensor), "ranks exchange sums"
        if self.shared is None:
            return exchange.combine(y)
        shared = self.shared.forward(x if self._cast is None else self._cast(x))
        return (
            exchange.combine(y, shared)
            if self.shared.down.partial
            else exchange.combine(y).add_(shared)
        )

    def _sum(self, y: Tensor, axes: tuple[str, ...]) -> Tensor:
        for axis in axes:
            y = self._collectives.all_reduce(y, axis)
        return y

    def _local(self, ids: Tensor) -> Tensor:
        """Expert numbers of this rank's tensors; -1 where another rank holds the expert."""
        local = ids - self.experts.first
        return local.masked_fill_((local < 0) | (local >= self.experts.count), -1)
