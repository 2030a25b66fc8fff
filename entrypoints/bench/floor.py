"""The memory floor of a decode step: bytes that must cross the device's memory, over its bandwidth.

Attention, dense, shared-expert, gate and head weights once; each routed expert that at least one token picks (uniform
independent routing: E * (1 - (1 - k / E)^B)); the KV cache of every sequence, read once.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glowplug.core.facts import DeviceFacts, ModelFacts
from glowplug.core.memory.layout import DTYPE_BYTES
from glowplug.core.parameters import is_moe_layer, stated
from glowplug.core.plan import EnginePlan

#: bytes a second that a large device copy reaches, read and written, by a part of the card's name (measured)
COPY_BANDWIDTH = {"H200": 4.3e12}
REACHABLE = 0.9  #: share of the vendor's bandwidth on cards that are not in the table
SCALE_BYTES = 4


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads: ``fixed`` weights, ``experts`` (the expected distinct ones), ``kv`` cache."""

    fixed: float
    experts: float
    kv: float

    @property
    def total(self) -> float:
        return self.fixed + self.experts + self.kv

    def seconds(self, bandwidth: float) -> float:
        return self.total / bandwidth


def step_bytes(model: ModelFacts, batch: int, context: int, *, element: float = 2, kv_element: float = 2) -> StepBytes:
    """Of ``batch`` sequences of ``context`` tokens, one token each.

    ``element``: bytes of an unquantized weight; a checkpoint in FP8 blocks keeps its own width, gate and head apart.
    """
    width, layers = weight_bytes(model, element), model.num_layers
    routed = sum(is_moe_layer(model, layer) for layer in range(layers))
    plain = layers * _attention(model) + (layers - routed) * 3 * model.hidden_size * stated(model, "intermediate_size")
    fixed = plain * width + model.vocab_size * model.hidden_size * element
    experts = 0.0
    if routed:
        expert = 3 * model.hidden_size * stated(model, "moe_intermediate_size") * width
        fixed += routed * (stated(model, "n_shared_experts") * expert
                           + model.n_routed_experts * model.hidden_size * element)
        experts = routed * expert * distinct_experts(model, batch)
    return StepBytes(fixed, experts, batch * context * layers * _kv_numbers(model) * kv_element)


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
    hidden, heads = model.hidden_size, model.num_heads
    if model.kind != "mla":
        return 2 * hidden * model.head_dim * (heads + model.num_kv_heads)
    nope, v = stated(model, "qk_nope_head_dim"), stated(model, "v_head_dim")
    query, rank, rope = heads * (nope + model.qk_rope_head_dim), model.kv_lora_rank, model.qk_rope_head_dim
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
    rates = [next((rate for part, rate in COPY_BANDWIDTH.items() if part in card.name), card.bandwidth * REACHABLE)
             for card in devices]
    return min(rates, default=0.0)


def plan_floor(plan: EnginePlan, batch: int, context: int) -> StepBytes:
    """The floor of the plan's model on one rank, in the plan's dtypes."""
    return step_bytes(plan.facts.model, batch, context, element=DTYPE_BYTES[plan.dtype],
                      kv_element=DTYPE_BYTES[plan.kv_dtype])
