"""Floors: the least time that a decode step, a prefill or a served request can take on a card.

The floor of a decode step is the number of bytes that must be read from device memory, divided by
the bandwidth. Attention, dense, shared-expert, gate and head weights count once. A routed expert
counts if at least one token picks it (expected number under uniform independent routing: E * (1 -
(1 - k / E)^B)). The KV cache of every sequence is read once. ``step_floor.py`` adds drafts.

The floor of a prefill is the time of its multiplications at the card's matrix rate, or of one read
of the weights if that takes longer. Several ranks share both; their exchanges may run meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.model_facts import DeviceFacts, ModelFacts
from glowplug.entrypoints.bench.ranks.exchange_times import ExchangeTimes

#: substring of the card's name -> bytes per second of a large device copy, read and written
#: (measured)
COPY_BANDWIDTH = {"H200": 4.3e12}
REACHED_SHARE = 0.9  #: assumed share of the vendor's bandwidth for cards without a measurement
#: substring of the card's name -> operations per second of a large GEMM of random numbers in
#: (bfloat16, FP8); bfloat16 is measured, FP8 is assumed to be twice as fast
MATRIX_RATE = {"H200": (7.9e14, 1.58e15)}
SCALE_BYTES = 4  #: bytes of a block's float32 scale
ONE_RANK: Mapping[str, int] = MappingProxyType({})  #: the mesh of one rank


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads.

    Attributes:
        fixed: weights that every step reads.
        experts: weights of the expected number of distinct routed experts.
        kv: KV cache.
    """

    fixed: float
    experts: float
    kv: float

    @property
    def total(self) -> float:
        return self.fixed + self.experts + self.kv

    def __add__(self, other: StepBytes) -> StepBytes:
        return StepBytes(self.fixed + other.fixed, self.experts + other.experts, self.kv + other.kv)

    def seconds(self, bandwidth: float) -> float:
        """Return the seconds that the reads take at ``bandwidth`` bytes per second."""
        return self.total / bandwidth


def step_bytes(
    model: ModelFacts,
    batch: int,
    context: int,
    *,
    width: int = 1,
    element: float = 2,
    kv_element: float = 2,
    mesh: Mapping[str, int] = ONE_RANK,
) -> StepBytes:
    """Return the bytes that a rank reads in a decode step of sequences of ``context`` tokens.

    Args:
        batch: number of sequences, over all groups of ranks.
        width: tokens of each sequence in the step. They choose experts of their own, and read the
            sequence's KV cache together.
        element: bytes of an unquantized weight. Weights in FP8 blocks count with their own width;
            the gate and the head are not quantized.
        kv_element: bytes of a number in the KV cache.
        mesh: mesh axis -> size.
    """
    heads = axis_size("attn_tp", mesh)  # ranks that share the attention heads
    rows = -(-batch // mesh.get("dp", 1))
    numbers = context * model.num_layers * _kv_numbers(model) / _kv_parts(model, heads)
    return StepBytes(
        _fixed(model, element, mesh),
        _experts(model, element, mesh, batch * width),
        rows * numbers * kv_element,
    )


def _fixed(model: ModelFacts, element: float, mesh: Mapping[str, int]) -> float:
    """Return the bytes of the weights on a rank that every step reads; see ``step_bytes``."""
    width = weight_bytes(model, element)
    ranks = mesh.get("tp", 1)
    heads = axis_size("attn_tp", mesh)
    routed = sum(model.sizes.routed[: model.num_layers])
    dense = (model.num_layers - routed) * 3 * model.hidden_size * model.sizes.width / ranks
    found = (model.num_layers * _attention(model, heads) + dense) * width
    found += model.vocab_size * model.hidden_size * element / heads
    if routed:
        sharers = heads if mesh.get("ep", 1) > 1 else ranks
        shared = model.sizes.shared_experts * _expert(model) * width / sharers
        found += routed * (shared + model.n_routed_experts * model.hidden_size * element)
    return found


def _experts(model: ModelFacts, element: float, mesh: Mapping[str, int], tokens: int) -> float:
    """Return the expected bytes of the routed experts on a rank that a step reads."""
    routed = sum(model.sizes.routed[: model.num_layers])
    if not routed:
        return 0.0
    whole = routed * _expert(model) * weight_bytes(model, element)
    return whole * distinct_experts(model, tokens) / mesh.get("tp", 1)


def _expert(model: ModelFacts) -> int:
    """Return the number of weight elements of one routed expert."""
    return 3 * model.hidden_size * model.sizes.expert_width


@dataclass(frozen=True)
class PrefillWork:
    """Floating-point operations of a prefill.

    Attributes:
        linear: operations in the dtype of the weights.
        wide: operations that are always in bfloat16 (scores, gates, head).
        fp8: True if the weights are FP8.
    """

    linear: float
    wide: float
    fp8: bool

    def seconds(self, rates: tuple[float, float]) -> float:
        """Return the seconds of the work at ``rates``: operations per second in (bfloat16, FP8)."""
        return self.linear / rates[self.fp8] + self.wide / rates[0]


def prefill_work(model: ModelFacts, prompts: int, length: int) -> PrefillWork:
    """Return the operations of a prefill of ``prompts`` prompts of ``length`` tokens each.

    Attention is causal, MLA is not absorbed, and only each prompt's last token has logits.
    """
    layers = model.num_layers
    hidden = model.hidden_size
    tokens = prompts * length
    routed = sum(model.sizes.routed[:layers])
    weights = layers * _attention(model) + (layers - routed) * 3 * hidden * model.sizes.width
    gates = 0
    if routed:
        each = model.sizes.shared_experts + model.sizes.experts_per_token
        weights += routed * each * 3 * hidden * model.sizes.expert_width
        gates = routed * model.n_routed_experts * hidden
    pairs = prompts * length * (length + 1) / 2
    scores = pairs * layers * model.num_heads * _head_channels(model)
    return PrefillWork(
        2.0 * tokens * weights,
        2.0 * (tokens * gates + scores + prompts * model.vocab_size * hidden),
        weight_bytes(model, 2) < 2,
    )


def _head_channels(model: ModelFacts) -> int:
    """Return the number of channels of one head's key and value together."""
    if model.kind != "mla":
        return 2 * model.head_dim
    return model.head_dim + model.sizes.value


@dataclass(frozen=True)
class Card:
    """The measured rates of a card.

    Attributes:
        bandwidth: bytes per second of device memory.
        rates: operations per second in (bfloat16, FP8).
        mesh: mesh axis -> size, of the ranks on several such cards.
        exchanges: times of the exchanges between ranks; None: they do not count.
    """

    bandwidth: float
    rates: tuple[float, float]
    mesh: Mapping[str, int] = field(default_factory=dict)
    exchanges: ExchangeTimes | None = None

    def decode(self, model: ModelFacts, batch: int, context: int) -> float:
        """Return the least seconds of one decode step, with weights and cache in usual widths."""
        read = step_bytes(model, batch, context, mesh=self.mesh).seconds(self.bandwidth)
        sent = 0.0 if self.exchanges is None else self.exchanges.step(model, self.mesh, batch)
        return read + sent

    def prefill(self, model: ModelFacts, prompts: int, length: int) -> float:
        """Return the least seconds of a prefill of ``prompts`` prompts of ``length`` tokens each.

        The time to read the weights covers the experts that the tokens are expected to choose.
        """
        read = step_bytes(model, prompts * length, 0, mesh=self.mesh).seconds(self.bandwidth)
        work = prefill_work(model, prompts, length).seconds(self.rates)
        return max(work / self.mesh.get("tp", 1), read)

    def served(
        self,
        model: ModelFacts,
        concurrency: int,
        prompt: int,
        output: int,
        token_seconds: float | None = None,
    ) -> dict[str, float]:
        """Return the floors (best possible values) of a server's metrics at one concurrency.

        The keys are those of ``bench serving``. The model of the load: ``concurrency`` prompts
        arrive at once and are prefilled one after another. Then all decode together, half-way
        through their outputs on average.

        Args:
            model: the model.
            concurrency: number of requests.
            prompt: prompt tokens of a request.
            output: output tokens of a request.
            token_seconds: least seconds in which each request gains a token; None: those of a
                decode step without drafts.
        """
        prompts = self.prefill(model, concurrency, prompt)
        step = token_seconds or self.decode(model, concurrency, prompt + output // 2)
        first = max(self.prefill(model, 1, prompt), prompts * (concurrency + 1) / (2 * concurrency))
        return {
            "mean_ttft_ms": first * 1e3,
            "mean_tpot_ms": step * 1e3,
            "output_throughput": concurrency * output / (prompts + (output - 1) * step),
        }


def known_card(name: str) -> Card | None:
    """Return the card whose key is a substring of ``name``; None if it has not been measured."""
    return next(
        (
            Card(rate, MATRIX_RATE[part])
            for part, rate in COPY_BANDWIDTH.items()
            if part in name and part in MATRIX_RATE
        ),
        None,
    )


def measured_card(name: str) -> Card:
    """Return the card whose key is a substring of ``name``.

    Raises:
        ValueError: the card has not been measured.
    """
    card = known_card(name)
    if card is None:
        raise ValueError(
            f"--floor-card {name}: bandwidth and matrix rate of this card have not been measured"
        )
    return card


def distinct_experts(model: ModelFacts, tokens: int) -> float:
    """Return the expected number of distinct experts that ``tokens`` tokens choose in a layer."""
    total = model.n_routed_experts
    return total * (1 - (1 - model.sizes.experts_per_token / total) ** tokens)


def weight_bytes(model: ModelFacts, element: float) -> float:
    """Return the bytes per element of a linear layer's weight, with its share of block scales."""
    if model.quant_method == "none" or model.quant_block is None:
        return element
    rows, columns = model.quant_block
    return 1 + SCALE_BYTES / (rows * columns)


def _attention(model: ModelFacts, heads: int = 1) -> float:
    """Return the number of weight elements of one attention layer on one rank.

    ``heads``: number of ranks that share the heads; every rank has the latent projections.
    """
    hidden = model.hidden_size
    count = model.num_heads / heads
    read = input_projections(model, heads)
    if model.kind != "mla":
        return read + hidden * model.head_dim * count
    nope = model.head_dim - model.qk_rope_head_dim
    v = model.sizes.value
    low = model.sizes.query_rank
    query = low * count * model.head_dim
    return read + query + model.kv_lora_rank * count * (nope + v) + count * v * hidden


def input_projections(model: ModelFacts, heads: int = 1) -> float:
    """Return the elements on one rank of the projections that multiply a layer's input.

    ``heads``: number of ranks that share the heads.
    """
    hidden = model.hidden_size
    count = model.num_heads / heads
    if model.kind != "mla":
        keys = model.num_kv_heads / _kv_parts(model, heads)
        return hidden * model.head_dim * (count + 2 * keys)
    queries = model.sizes.query_rank or count * model.head_dim
    return hidden * (queries + model.kv_lora_rank + model.qk_rope_head_dim)


def _kv_parts(model: ModelFacts, heads: int) -> int:
    """Return the number of parts of a token's cache on ``heads`` ranks that share the heads."""
    return 1 if model.kind == "mla" else min(heads, model.num_kv_heads)


def _kv_numbers(model: ModelFacts) -> int:
    """Return the number of elements that one token stores in the KV cache of one layer."""
    if model.kind == "mla":
        return model.kv_lora_rank + model.qk_rope_head_dim
    return 2 * model.num_kv_heads * model.head_dim


def card_bandwidth(devices: Sequence[DeviceFacts]) -> float:
    """Return the bytes per second that a copy reaches on the slowest card; 0 if there are none."""
    rates = [
        next(
            (rate for part, rate in COPY_BANDWIDTH.items() if part in card.name),
            card.bandwidth * REACHED_SHARE,
        )
        for card in devices
    ]
    return min(rates, default=0.0)
