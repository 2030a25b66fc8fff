"""Exchange of tokens with the ranks of their experts and back, checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.facts.mesh import group
from glowplug.core.layers.linear import caster
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import ExpertExchange, ExpertsShape, Quantized
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Batch, StepShape, idle_batch
from glowplug.entrypoints.bench.ranks.exchange_times import EXCHANGE
from glowplug.entrypoints.bench.ranks.operations import (
    FP8_ERROR,
    Operation,
    difference,
    random_numbers,
)


class ExpertExchanges:
    """Dispatch and combine of the tokens of a layer with routed experts.

    Args:
        context: the rank's components.
        plan: the plan, whose strategies exchange tokens.
    """

    def __init__(self, context: BuildContext, plan: EnginePlan) -> None:
        model = plan.facts.model
        layer = next(number for number, routed in enumerate(model.sizes.routed) if routed)
        name = f"model.layers.{layer}.mlp"
        exchange = context.parallel.expert_exchange(name, model.n_routed_experts)
        assert exchange is not None, "the plan has a strategy that exchanges tokens"
        self._exchange: ExpertExchange = exchange
        self._context = context
        self._model = model
        self._seed = plan.seed + context.worker.coordinates["dp"]
        self._ranks = len(group("tp", context.worker.rank, plan.mesh))
        self._group = len(group("attn_tp", context.worker.rank, plan.mesh))
        #: ranks that hold parts of the same experts; each computes its part of a token's sum
        self._sharers = len(group("moe_tp", context.worker.rank, plan.mesh))
        width = model.sizes.expert_width
        expert = ExpertsShape(f"{name}.experts", 1, 0, model.hidden_size, width, 0, width, 1)
        gate = f"{name}.experts.0.gate_proj"
        scheme = context.scheme_for(gate, width, model.hidden_size)
        self._reader = context.experts(scheme, expert)
        self._cast = caster(context.ops, self._reader)

    def operations(self, tokens: Iterable[int]) -> Iterator[Operation]:
        """Yield the exchange of each number of tokens of a rank.

        Exchanges that can send tokens in the experts' input format are yielded in this form too.
        """
        eps = float(torch.finfo(self._context.dtype).eps)
        for count in tokens:
            sent = ExchangedTokens(self._exchange, *self._tokens(count))
            yield self._operation(EXCHANGE, count, (self._ranks + 2) * eps, sent)
            if self._cast is not None and sent.quantizes(self._reader.input_format):
                name = f"{EXCHANGE} ({self._reader.input_format})"
                yield self._operation(name, count, FP8_ERROR, sent.cast(self._cast))

    def _operation(
        self, name: str, tokens: int, tolerance: float, sent: ExchangedTokens
    ) -> Operation:
        """Return the exchange of ``sent``, ``tokens`` of each rank."""
        return Operation(
            name,
            "tp",
            self._ranks,
            tokens * self._model.hidden_size * self._context.dtype.itemsize,
            tokens,
            0.0,
            tolerance,
            partial(sent.error, self._sharers),
            sent.run,
        )

    def _tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random tokens of this rank's group, ``count`` a rank, as ``dispatch`` takes them.

        Each token has random experts, all different.
        """
        rows = count * self._group
        generator = torch.Generator().manual_seed(self._seed)
        scores = torch.rand(rows, self._model.n_routed_experts, generator=generator)
        weights, ids = scores.topk(self._model.sizes.experts_per_token)
        weights /= weights.sum(-1, keepdim=True)
        x = random_numbers(self._context, self._seed, rows, self._model.hidden_size)
        return x, ids.to(x.device), weights.to(x.device)


class ExchangedTokens:
    """Tokens that are sent to their experts and back.

    The experts of the check multiply a token by its weight, so that the result does not depend on
    where an expert is.

    Args:
        exchange: the exchange.
        x: tokens of this rank's group, [T, hidden].
        ids: chosen experts, int64 [T, K].
        weights: float32 [T, K].
        cast: function to the form in which the tokens are sent; None: as they are.
    """

    def __init__(
        self,
        exchange: Any,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        cast: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self._exchange = exchange
        self._x = x
        self._ids = ids
        self._weights = weights
        self._cast = cast
        self._batch = step_of(len(x))
        zeros = torch.zeros_like(x)
        self._zeros = zeros if cast is None else cast(zeros)

    def cast(self, cast: Callable[[Tensor], Any]) -> ExchangedTokens:
        """Return the same tokens, to be sent in the form that ``cast`` makes."""
        return ExchangedTokens(self._exchange, self._x, self._ids, self._weights, cast)

    def quantizes(self, input_format: str) -> bool:
        """Return whether the exchange sends this step's tokens in ``input_format``."""
        sends = getattr(self._exchange, "sends_quantized", None)
        return sends is not None and bool(sends(input_format, self._batch))

    def _dispatch(self, x: Tensor | Quantized) -> tuple[Tensor | Quantized, Tensor, Tensor]:
        dispatch = (
            self._exchange.dispatch if isinstance(x, Tensor) else self._exchange.dispatch_quantized
        )
        sent: tuple[Tensor | Quantized, Tensor, Tensor] = dispatch(
            x, self._ids, self._weights, self._batch
        )
        return sent

    def error(self, sharers: int) -> float:
        """Return the largest difference from the tokens times the sums of their weights.

        ``sharers``: number of ranks that each compute a part of an expert's result.
        """
        given = self._x.clone() if self._cast is None else self._cast(self._x)
        sent, ids, factors = self._dispatch(given)
        share = (factors.float() * (ids >= 0)).sum(-1, keepdim=True) / sharers
        y = torch.where(share > 0, plain_tokens(sent) * share, 0.0).to(self._x.dtype)
        wanted = self._x.float() * self._weights.sum(-1, keepdim=True)
        return difference(self._exchange.combine(y), wanted)

    def run(self) -> Tensor:
        """Send zeros to the tokens' experts and back."""
        sent, _, _ = self._dispatch(self._zeros)
        if isinstance(sent, Tensor):
            return self._combined(sent)
        return self._combined(self._x.new_empty(sent.values.shape))

    def _combined(self, y: Tensor) -> Tensor:
        found: Tensor = self._exchange.combine(y)
        return found


def plain_tokens(x: Tensor | Quantized) -> Tensor:
    """Return tokens in float32; those in groups of channels are multiplied by their scales."""
    if isinstance(x, Tensor):
        return x.float()
    values = x.values.float()
    if x.scales is None:
        return values
    width = -(-values.shape[1] // x.scales.shape[1])
    return values * x.scales.float().repeat_interleave(width, 1)[:, : values.shape[1]]


def step_of(tokens: int) -> Batch:
    """Return a batch of ``tokens`` rows that decode one token each, as all ranks agreed."""
    batch = idle_batch()
    batch.mode = Mode.DECODE
    batch.rows = np.arange(tokens, dtype=np.int32)
    batch.query_lens = np.ones(tokens, np.int32)
    batch.num_decodes = tokens
    batch.agreed = StepShape(Mode.DECODE, tokens, tokens)
    return batch
