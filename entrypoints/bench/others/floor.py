"""Floors: the least time that a decode step, a prefill or a served request can take on a card.

A decode step: bytes that must cross the device's memory, over its bandwidth. Attention, dense,
shared-expert, gate and head weights once; each routed expert that at least one token picks (uniform
independent routing: E * (1 - (1 - k / E)^B)); the KV cache of every sequence, read once.

A prefill: its multiplications over the card's matrix rate, or one reading of the weights if that
takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.model_facts import DeviceFacts, ModelFacts
from glowplug.core.facts.parameters import is_moe_layer, stated
from glowplug.core.plan.plan import EnginePlan

#: bytes a second that a large device copy reaches, read and written, by a part of the card's name
#: (measured)
COPY_BANDWIDTH = {"H200": 4.3e12}
REACHABLE = 0.9  #: share of the vendor's bandwidth on cards that are not in the table
#: operations a second of a large matrix product of random numbers, by a part of the card's name: in
#: bfloat16 (measured) and in FP8, taken as twice that
MATRIX_RATE = {"H200": (7.9e14, 1.58e15)}
SCALE_BYTES = 4


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads: ``fixed`` weights, ``experts`` (the expected distinct
    ones), ``kv`` cache.
    """

    fixed: float
    experts: float
    kv: float

    @property
    def total(self) -> float:
        return self.fixed + self.experts + self.kv

    def seconds(self, bandwidth: float) -> float:
        return self.total / bandwidth


def step_bytes(
    model: ModelFacts, batch: int, context: int, *, element: float = 2, kv_element: float = 2
) -> StepBytes:
    """Of ``batch`` sequences of ``context`` tokens, one token each.

    ``element``: bytes of an unquantized weight; a checkpoint in FP8 blocks keeps its own width,
    gate and head apart.
    """
    width = weight_bytes(model, element)
    layers = model.num_layers
    routed = sum(is_moe_layer(model, layer) for layer in range(layers))
    plain = layers * _attention(model) + (layers - routed) * 3 * model.hidden_size * stated(
        model, "intermediate_size"
    )
    fixed = plain * width + model.vocab_size * model.hidden_size * element
    experts = 0.0
    if routed:
        expert = 3 * model.hidden_size * stated(model, "moe_intermediate_size") * width
        fixed += routed * (
            stated(model, "n_shared_experts") * expert
            + model.n_routed_experts * model.hidden_size * element
        )
        experts = routed * expert * distinct_experts(model, batch)
    return StepBytes(fixed, experts, batch * context * layers * _kv_numbers(model) * kv_element)


@dataclass(frozen=True)
class PrefillWork:
    """Operations of a prefill: ``linear`` in the weights' own dtype, ``wide`` in bfloat16 (scores,
    gates, head).
    """

    linear: float
    wide: float
    fp8: bool

    def seconds(self, rates: tuple[float, float]) -> float:
        """At ``rates`` operations a second in bfloat16 and in FP8."""
        return self.linear / rates[self.fp8] + self.wide / rates[0]


def prefill_work(model: ModelFacts, prompts: int, length: int) -> PrefillWork:
    """Of ``prompts`` prompts of ``length`` tokens, causal, un-absorbed, logits of the last token of
    each.
    """
    layers = model.num_layers
    hidden = model.hidden_size
    tokens = prompts * length
    routed = sum(is_moe_layer(model, layer) for layer in range(layers))
    weights = layers * _attention(model) + (layers - routed) * 3 * hidden * stated(
        model, "intermediate_size"
    )
    gates = 0
    if routed:
        each = stated(model, "n_shared_experts") + stated(model, "num_experts_per_tok")
        weights += routed * each * 3 * hidden * stated(model, "moe_intermediate_size")
        gates = routed * model.n_routed_experts * hidden
    pairs = prompts * length * (length + 1) / 2
    scores = pairs * layers * model.num_heads * _head_channels(model)
    return PrefillWork(
        2.0 * tokens * weights,
        2.0 * (tokens * gates + scores + prompts * model.vocab_size * hidden),
        weight_bytes(model, 2) < 2,
    )


def _head_channels(model: ModelFacts) -> int:
    """Channels of one head's keys and values together."""
    if model.kind != "mla":
        return 2 * model.head_dim
    return stated(model, "qk_nope_head_dim") + model.qk_rope_head_dim + stated(model, "v_head_dim")


@dataclass(frozen=True)
class Card:
    """What floors are taken over: ``bandwidth`` in bytes a second, ``rates`` in operations
    (bfloat16, FP8).
    """

    bandwidth: float
    rates: tuple[float, float]

    def decode(self, model: ModelFacts, batch: int, context: int) -> float:
        """Seconds of one step, weights and cache in their usual widths."""
        return step_bytes(model, batch, context).seconds(self.bandwidth)

    def prefill(self, model: ModelFacts, prompts: int, length: int) -> float:
        """Seconds; with as many tokens as that, every expert a prompt can pick is read."""
        read = step_bytes(model, prompts * length, 0).seconds(self.bandwidth)
        return max(prefill_work(model, prompts, length).seconds(self.rates), read)

    def served(
        self, model: ModelFacts, concurrency: int, prompt: int, output: int
    ) -> dict[str, float]:
        """Floors of a closed loop by ``bench serving``'s keys: ``concurrency`` prompts come at
        once, one is computed after another, then all decode together, half-way through on
        average."""
        prompts = self.prefill(model, concurrency, prompt)
        step = self.decode(model, concurrency, prompt + output // 2)
        first = max(self.prefill(model, 1, prompt), prompts * (concurrency + 1) / (2 * concurrency))
        return {
            "mean_ttft_ms": first * 1e3,
            "mean_tpot_ms": step * 1e3,
            "output_throughput": concurrency * output / (prompts + (output - 1) * step),
        }


def known_card(name: str) -> Card | None:
    """By a part of its name; None when it has not been measured."""
    return next(
        (
            Card(rate, MATRIX_RATE[part])
            for part, rate in COPY_BANDWIDTH.items()
            if part in name and part in MATRIX_RATE
        ),
        None,
    )


def measured_card(name: str) -> Card:
    """The same. ValueError where it has not been measured."""
    card = known_card(name)
    if card is None:
        raise ValueError(
            f"--floor-card {name}: its bandwidth and matrix rate have not been measured"
        )
    return card


def distinct_experts(model: ModelFacts, tokens: int) -> float:
    """How many experts of a layer ``tokens`` tokens are expected to pick."""
    total = model.n_routed_experts
    return total * (1 - (1 - stated(model, "num_experts_per_tok") / total) ** tokens)


def weight_bytes(model: ModelFacts, element: float) -> float:
    """Bytes of one weight of a linear layer, its share of the block's scale included."""
    if model.quant_method == "none" or model.quant_block is None:
        return element
    rows, columns = model.quant_block
    return 1 + SCALE_BYTES / (rows * columns)


def _attention(model: ModelFacts) -> int:
    """Weights of one attention layer."""
    hidden = model.hidden_size
    heads = model.num_heads
    if model.kind != "mla":
        return 2 * hidden * model.head_dim * (heads + model.num_kv_heads)
    nope = stated(model, "qk_nope_head_dim")
    v = stated(model, "v_head_dim")
    query = heads * (nope + model.qk_rope_head_dim)
    rank = model.kv_lora_rank
    rope = model.qk_rope_head_dim
    low = stated(model, "q_lora_rank")
    queries = hidden * low + low * query if low else hidden * query
    return queries + hidden * (rank + rope) + rank * heads * (nope + v) + heads * v * hidden


def _kv_numbers(model: ModelFacts) -> int:
    """Numbers that one token keeps in one layer's cache."""
    if model.kind == "mla":
        return model.kv_lora_rank + model.qk_rope_head_dim
    return 2 * model.num_kv_heads * model.head_dim


def card_bandwidth(devices: Sequence[DeviceFacts]) -> float:
    """Bytes a second that a copy reaches on the slowest card; 0 when none is known."""
    rates = [
        next(
            (rate for part, rate in COPY_BANDWIDTH.items() if part in card.name),
            card.bandwidth * REACHABLE,
        )
        for card in devices
    ]
    return min(rates, default=0.0)


def plan_floor(plan: EnginePlan, batch: int, context: int) -> StepBytes:
    """The floor of the plan's model on one rank, in the plan's dtypes."""
    return step_bytes(
        plan.facts.model,
        batch,
        context,
        element=DTYPE_BYTES[plan.dtype],
        kv_element=DTYPE_BYTES[plan.kv_dtype],
    )
