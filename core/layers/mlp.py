"""The gated feed-forward layer."""

from __future__ import annotations

from typing import Any

from glowplug.core.facts.decoder_names import MATRICES
from glowplug.core.layers.linear import Linear, Part, Terms, producer
from glowplug.core.layers.module import Module
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Batch


class Mlp(Module):
    """The gated feed-forward layer down(silu(gate x) * up x).

    Gate and up are one GEMM.

    Args:
        width: intermediate size.
        bias: True: all three projections have biases.
        reduce: True: sum partial results over the ranks; False: the caller does.
        matrices: names of the gate, up and down projections in the checkpoint.
        shared: the layer is the shared expert of a layer with routed experts.
        sums_in_norm: True: the sum may be left to a norm that follows; False: none follows.
    """

    exchanges = False  #: input is the tokens that every rank computes, not this rank's own

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden: int,
        width: int,
        *,
        bias: bool = False,
        reduce: bool = True,
        sums_in_norm: bool = True,
        matrices: tuple[str, str, str] = MATRICES,
        shared: bool = False,
    ) -> None:
        gate, up, down = matrices
        outputs, inputs = ("shared_column", "shared_row") if shared else ("column", "row")
        self.gate_up = Linear(
            context,
            f"{name}.gate_up_proj",
            hidden,
            [
                Part(f"{name}.{gate}", width, outputs, bias=bias),
                Part(f"{name}.{up}", width, outputs, bias=bias),
            ],
        )
        self.down = Linear(
            context,
            f"{name}.{down}",
            width,
            [Part(f"{name}.{down}", hidden, "replicated", bias=bias)],
            input_role=inputs,
            reduce=reduce,
        )
        # the sum over the ranks may be left to the next norm, unless tokens move before it
        plain = context.parallel.moves_tokens or not sums_in_norm
        self._down = self.down.forward if plain else self.down.forward_in_norm
        self._activate = producer(context.ops, "silu_and_mul", self.down)
        self.input_format = self.gate_up.input_format

    def forward(self, x: Any, batch: Batch | None = None) -> Terms:
        """Run the layer on x [T, hidden] and return [T, hidden].

        The result is a ``PartialSum`` if the next norm sums over the ranks.

        Args:
            x: activations, plain or in ``input_format``.
            batch: not used; feed-forward layers with an expert exchange need it.
        """
        return self._down(self._activate(self.gate_up.forward(x)))
