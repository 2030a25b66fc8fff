"""Activations of a step on a device: the peak memory of the layers. No torch.

The formulas follow ``core.layers``. A layer's caller holds the layer's input and residual until the
layer returns. The layer itself holds the residual after a norm, the normed tokens in the format in
which they are read, and the memory of attention or of the feed-forward block.
"""

from __future__ import annotations

from dataclasses import dataclass

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.byte_costs import (
    NUMBER_BYTES,
    AttentionStep,
    ExpertsStep,
    MemoryUse,
    gated_rows,
)
from glowplug.core.plugin.component import ChosenOf
from glowplug.core.plugin.offers import AttentionOffers, OpsOffers, QuantizationOffers
from glowplug.core.plugin.options import QuantizationOptions

#: bytes per token of ids, positions and kv slots, as sent to the device and as layers read them
INDICES = 40


@dataclass(frozen=True)
class StepTokens:
    """The token counts of a step.

    Attributes:
        own: tokens of this rank's dp group.
        gathered: tokens of all groups, which feed-forward layers compute.
        longest: number of tokens of the row with the most.
        cached: number of tokens that this row has in the cache before the step.
    """

    own: int
    gathered: int
    longest: int
    cached: int = 0


class LayerBytes:
    """Formulas for the bytes of activations that the layers of a proposal hold in a step.

    Attributes:
        model: facts of the model.
        mesh: mesh axis -> size.
        dtype: compute dtype.
        element: bytes of an element in the compute dtype.
        alike: all ranks compute all tokens of a step.
        heads: attention heads on a rank.
        rope: rotary elements of a head.
        value: elements of a head's value.
        key: elements of a head's query or key.
    """

    def __init__(self, proposal: Proposal) -> None:
        self.model = proposal.facts.model
        self.mesh = proposal.values.mesh
        values = proposal.values
        self.dtype: str = values.dtype
        self.element: int = DTYPE_BYTES[self.dtype]
        devices = proposal.facts.hardware.devices
        self._card, self._compute = (devices[0].name, devices[0].compute) if devices else ("", 0)
        self.alike = not proposal.exchanges
        collectives = proposal.collectives
        self._sums_in_norm = values.ranks == 1 or (
            self.alike and collectives is not None and collectives.offers.sums_in_norm
        )
        self._packages = proposal.facts.software.packages
        attention = proposal.attention
        scheme = proposal.quantization
        ops = proposal.ops
        self._attention = attention.offers if attention else AttentionOffers()
        self._ops = ops.offers if ops else OpsOffers()
        self._scheme, self._cast = _scheme(scheme, values.device)
        self._options = scheme.options if scheme else None
        self._expandable: bool = values.expandable_segments
        self.heads = -(-self.model.num_heads // axis_size("attn_tp", self.mesh))
        self.rope = self.model.qk_rope_head_dim or self.model.head_dim
        self.value = self.model.sizes.value or self.model.head_dim
        self.key = self.model.head_dim
        self._redundant = proposal.redundant_experts

    @property
    def latent(self) -> bool:
        """Attention is MLA, with a latent cache."""
        return self.model.kind == "mla"

    def with_features(self, step: StepTokens, features: int) -> int:
        """Return ``activations`` of a step of which a draft reads features.

        Features are kept until the pass ends, which returns them behind the normed states.

        Args:
            step: the step.
            features: number of features of a token, in hidden states.
        """
        stream = step.own * self.model.hidden_size * self.element
        plain = self.activations(step)
        most = (2 * features + 3) * stream
        return max(plain + features * stream, most) if features else plain

    def claimed(self, features: int, tokens: int) -> int:
        """Return the bytes that torch's allocator takes for a step, before it rounds up blocks.

        Args:
            features: number of features of a token that a draft reads, in hidden states.
            tokens: tokens of the step in each dp group.
        """
        step = self.even_step(tokens)
        mixed = any(self.model.sizes.routed[: self.model.num_layers])
        extra = self.experts(step.gathered).fragmentation if mixed and not self._expandable else 0
        return self.with_features(step, features) + extra

    def even_step(self, tokens: int) -> StepTokens:
        """Return the token counts of a step with ``tokens`` tokens in each dp group, of one row."""
        return StepTokens(tokens, tokens * self.mesh.get("dp", 1), tokens)

    def activations(self, step: StepTokens) -> int:
        """Return the peak bytes of a step's layers, including indices and rotations of tokens."""
        model = self.model
        hidden = model.hidden_size
        stream = step.own * hidden * self.element
        normed = self.cast(step.own, hidden)
        most = 0
        # bytes that the layer's caller holds
        before = stream
        kept = 0
        seen = set[tuple[bool, int, int]]()
        for layer in range(model.num_layers):
            moe = model.sizes.routes(layer)
            if (moe, before, kept) in seen:
                continue
            seen.add((moe, before, kept))
            work = self.experts(step.gathered) if moe else self.dense(step.gathered)
            read = self.both(step.gathered) if moe else self.cast(step.gathered, hidden)
            most = max(
                most,
                before + kept + (stream if layer else 0) + normed + self.attention(step),
                before + kept + stream + read + work.peak,
            )
            before = work.result
            kept = stream
        return most + step.own * (INDICES + self.rope * NUMBER_BYTES)

    def cast(self, tokens: int, size: int) -> int:
        """Return the bytes of activations [tokens, size] in the format that linear layers read."""
        return int(tokens * size * (self._cast or self.element))

    def both(self, tokens: int) -> int:
        """Return the bytes of the input of a layer with experts, which the gate reads too.

        If experts read quantised activations, the input is held in two formats, and both count.
        """
        plain = tokens * self.model.hidden_size * self.element
        return plain + (self.cast(tokens, self.model.hidden_size) if self._cast else 0)

    # ---- attention -------------------------------------------------------------------------------

    def attention(self, step: StepTokens) -> int:
        """Return the peak bytes of one attention layer, without those of its normed input."""
        model = self.model
        tokens = step.own
        element = self.element
        result = self.heads * self.value
        query = self.heads * self.key
        entry = model.kv_lora_rank + self.rope if self.latent else 0
        given = AttentionStep(
            tokens,
            step.longest,
            step.cached,
            self.heads,
            model.num_heads,
            self.key,
            self.value,
            entry,
            element,
        )
        work = (
            self._attention.work(given)
            if self._attention.work
            else tokens * (2 * query + 2 * result) * element
        )
        output = tokens * (result + model.hidden_size) * element + (
            self.cast(tokens, result) if self._cast else 0
        )
        if not self.latent:
            keys = -(-model.num_kv_heads // axis_size("attn_tp", self.mesh)) * self.key
            # projections, and the rotated queries and keys
            held = tokens * (query + 2 * keys + query + keys) * element
            return held + max(work, output)
        lora = model.sizes.query_rank
        projected = tokens * ((lora or query) + entry) * element
        queries = tokens * query * element if lora else 0
        return projected + max(queries + work, queries + self.cast(tokens, lora), output)

    # ---- feed-forward ----------------------------------------------------------------------------

    def dense(self, tokens: int) -> MemoryUse:
        """Return the memory use of a dense feed-forward layer."""
        return self._gated(tokens, -(-self.model.sizes.width // axis_size("tp", self.mesh)))

    def _gated(self, tokens: int, width: int) -> MemoryUse:
        """Return the memory use of a feed-forward block: gate and up projections, product, output.

        ``width``: intermediate size on this rank.
        """
        out = tokens * self.model.hidden_size * self.element
        inner = self.cast(tokens, width)
        return MemoryUse(max(2 * tokens * width * self.element + inner, inner + out), out)

    def _experts_held(self) -> int:
        """Return the number of routed experts on a rank, with redundant copies."""
        slots = self.model.n_routed_experts + self._redundant
        return -(-slots // axis_size("ep", self.mesh))

    @property
    def _fuses_shared(self) -> bool:
        """The shared expert is computed with the routed ones, which each rank has all of."""
        whole = self.alike and axis_size("ep", self.mesh) == 1
        return whole and "route" in self._ops.ops and self._scheme.fused_shared

    def experts(self, tokens: int) -> MemoryUse:
        """Return the memory use of a layer of routed experts, with its shared expert."""
        model = self.model
        inter = -(-model.sizes.expert_width // axis_size("moe_tp", self.mesh))
        count = self._experts_held()
        shared = model.sizes.shared_experts
        fused_shared = shared if self._fuses_shared else 0
        chosen = model.sizes.experts_per_token + fused_shared
        step = ExpertsStep(
            tokens,
            chosen,
            count + fused_shared,
            fused_shared,
            model.hidden_size,
            inter,
            self.element,
            self._ops.adds_parts and self._sums_in_norm and fused_shared == shared,
            self._options,
            self._packages,
            self.dtype,
            self._card,
            self._compute,
        )
        work = (self._scheme.experts_work or gated_rows)(step)
        routed = step.pairs * 2 * NUMBER_BYTES
        if fused_shared == shared:
            return MemoryUse(routed + work.peak, work.result, work.fragmentation)
        beside = self._gated(tokens, shared * inter)
        return MemoryUse(
            routed + max(work.peak, work.result + beside.peak), work.result, work.fragmentation
        )


def _scheme(
    chosen: ChosenOf[QuantizationOffers, QuantizationOptions] | None, device: str
) -> tuple[QuantizationOffers, float]:
    """Return the quantization's offers, and the bytes of an activation element in its GEMMs.

    The bytes are 0 if the GEMMs read the compute dtype.
    """
    if chosen is None:
        return QuantizationOffers(), 0.0
    offers = chosen.offers
    dequantizes = chosen.options.dequantizes(device, offers)
    return offers, 0.0 if dequantizes else offers.cast_bytes


def features_of(proposal: Proposal) -> int:
    """Return the number of hidden states of a token that a draft reads beside the final one."""
    speculative = proposal.speculative
    if speculative is None or proposal.drafts:
        return 0
    return speculative.options.features(proposal.facts.draft or proposal.facts.model)
