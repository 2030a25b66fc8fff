"""Mixture of experts: routed experts and shared expert, with the gate of ``layers.gate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from glowplug.core.layers.gate import Gate, MoeSizes
from glowplug.core.layers.linear import (
    FORMAT_PLAIN,
    Both,
    Terms,
    agreed_format,
    both_formats,
    caster,
)
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.module import Module
from glowplug.core.protocols import (
    ExpertExchange,
    ExpertsShape,
    PartialSum,
    Parts,
    Quantized,
    StartedExperts,
    WeightTarget,
)
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Batch

Start = Callable[[Tensor, int], StartedExperts | None]
#: ``ExpertExchange.select``
Select = Callable[[Tensor, Batch | None], Tensor]


class Experts(Module):
    """The routed experts of this rank.

    Args:
        name: module path of the routed experts, up to their numbers.
        sizes: sizes of the layer.
        fused_shared: number of further experts that hold the fused shared expert; 0: not fused.
        shared_name: module path of the shared expert.
        parts: True: results may be ``Parts``.

    Attributes:
        numbers: numbers of the experts on this rank, in order.
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
        placed = context.parallel.held_experts(name.rpartition(".")[0], sizes.experts)
        numbers = range(held.start, held.start + held.size) if placed is None else placed
        scheme = context.scheme_for(
            f"{name}.{numbers[0]}.{sizes.names[0]}", sizes.width, sizes.hidden
        )
        width = context.parallel.shard("expert_width", name, sizes.width, scheme.block)
        self.name = name
        self.names = sizes.names
        self.numbers = numbers
        self.count = len(numbers)
        self.total = sizes.experts
        self.method = context.experts(
            scheme,
            ExpertsShape(
                prefix=name,
                count=len(numbers),
                first=numbers[0],
                hidden=sizes.hidden,
                inter=width.size,
                inter_start=width.start,
                inter_full=width.full,
                total=sizes.experts,
                fused_shared=fused_shared,
                shared_prefix=shared_name,
                parts=parts,
                held=placed,
                names=sizes.names,
            ),
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
            if expert not in self.numbers:
                yield from (f"{self.name}.{expert}.{part}" for part in self.names)

    def finalize(self) -> None:
        """Convert the loaded weights into the form that the method computes with."""
        self.method.finalize()


def _shared_expert(context: BuildContext, name: str, sizes: MoeSizes) -> Mlp:
    """Return the shared expert as a layer of its own; the caller sums its partial results."""
    return Mlp(
        context,
        name,
        sizes.hidden,
        sizes.shared,
        reduce=False,
        matrices=sizes.names,
        shared=True,
    )


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
        self.gate = Gate(context, f"{name}.{sizes.router}", sizes)
        self._set_exchange(context, name, sizes)
        # the ids of a fused shared expert are beyond those that a strategy selects from
        fused_shared = 0 if self._select else self._fused_shared_count(context, name, sizes)
        self.gate.fused_shared = fused_shared
        shared_name = f"{name}.{sizes.shared_name}"
        separate = sizes.shared > 0 and not fused_shared
        self.experts = Experts(
            context,
            f"{name}.{sizes.container}",
            sizes,
            fused_shared,
            shared_name if fused_shared else "",
            parts=self._gives_parts and not separate,
        )
        self.shared = _shared_expert(context, shared_name, sizes) if separate else None
        # NOTE: experts that start before the gate has chosen could not wait for masked ids
        early = fused_shared > 0 and self.gate.sets_ready and not context.parallel.moves_tokens
        self._start: Start | None = getattr(self.experts.method, "start", None) if early else None
        self._set_input_format(context)

    def _set_exchange(self, context: BuildContext, name: str, sizes: MoeSizes) -> None:
        """Set the exchange of tokens between ranks, and which sums the next norm computes."""
        found = context.parallel.expert_exchange(name, sizes.experts)
        stays = getattr(found, "stays", False)
        self._select: Select | None = found.select if stays else None  # type: ignore[union-attr]
        self._exchange = None if stays else found
        self.exchanges = self._exchange is not None
        self._masks = not getattr(found, "masks_padding", False)
        moves = self.exchanges or context.parallel.moves_tokens
        # the results go straight to the next norm, which sums them over the ranks
        self._in_norm = not moves and context.sums_in_norm
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
        first = f"{name}.{sizes.container}.0.{sizes.names[0]}"
        scheme = context.scheme_for(first, sizes.width, sizes.hidden)
        shared = f"{name}.{sizes.shared_name}.{sizes.names[0]}"
        together = (
            context.ops.route is not None
            and Moe._split_alike(context, name, sizes, scheme.block)
            and scheme.fused_shared
            and scheme is context.scheme_for(shared, sizes.shared, sizes.hidden)
        )
        return sizes.shared // sizes.width if together and sizes.shared % sizes.width == 0 else 0

    @staticmethod
    def _split_alike(context: BuildContext, name: str, sizes: MoeSizes, block: int) -> bool:
        """Return whether ranks split routed experts and the shared expert in the same way."""
        parallel = context.parallel
        experts = f"{name}.{sizes.container}"
        shared = f"{name}.{sizes.shared_name}.{sizes.names[0]}"
        held = parallel.shard("experts", experts, sizes.experts)
        width = parallel.shard("expert_width", experts, sizes.width, block)
        column = parallel.shard("shared_column", shared, sizes.shared, block)
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
            return self._mixed(x.cast, self._masked(ids, batch), weights, batch)
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
        return self._mixed(x if self._cast is None else self._cast(x), ids, weights, batch)

    def _masked(self, ids: Tensor, batch: Batch | None) -> Tensor:
        """Replace the routed experts of the step's padding by -1 in ``ids`` [T, K].

        The exchange may do so itself.
        """
        padding = None if batch is None or not self._masks else batch.padding
        if padding is not None:
            mask = padding.own if self.exchanges else padding.gathered
            if mask is not None:
                ids[:, : self.gate.sizes.topk].masked_fill_(mask, -1)
        return ids

    def _mixed(
        self, cast: Tensor | Quantized, ids: Tensor, weights: Tensor, batch: Batch | None
    ) -> Terms:
        """Run the routed and shared experts on ``cast`` and sum the results over ranks."""
        local = self._local(ids, batch)
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
        sends_quantized = getattr(exchange, "sends_quantized", None)
        given: Tensor | Quantized = x
        sent: Tensor | Quantized
        if sends_quantized is not None and sends_quantized(self.experts.input_format, batch):
            given = self._formatted(x)
            sent, ids, weights = exchange.dispatch_quantized(  # type: ignore[attr-defined]
                given, ids, weights, batch
            )
        else:
            sent, ids, weights = exchange.dispatch(x, ids, weights, batch)
        y = self.experts.forward(self._formatted(sent), ids, weights)
        assert isinstance(y, Tensor), "an exchange takes sums, not ``Parts``"
        if self.shared is None:
            return exchange.combine(y)
        shared = self.shared.forward(self._formatted(given))
        assert isinstance(shared, Tensor), "the shared expert's terms are added here"
        return (
            exchange.combine(y, shared)
            if self.shared.down.partial
            else exchange.combine(y).add_(shared)
        )

    def _formatted(self, x: Tensor | Quantized) -> Tensor | Quantized:
        """Return x in the input format of the routed and shared experts."""
        return self._cast(x) if self._cast is not None and isinstance(x, Tensor) else x

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

    def _local(self, ids: Tensor, batch: Batch | None) -> Tensor:
        """Convert expert ids of the layer to ids on this rank; -1 for experts of other ranks."""
        if self._select is not None:
            return self._select(ids, batch)
        if self.experts.count == self.gate.sizes.experts:
            return ids
        local = ids - self.experts.numbers[0]
        return local.masked_fill_((local < 0) | (local >= self.experts.count), -1)
