"""Activations of a step on a device: what layers hold at once while they pass a step's tokens on.
No torch.

The order of ``core.layers``: a layer's caller keeps the layer's own input and residual until the
layer returns; beside them stand the residual after a norm, the normed tokens in the format of who
reads them, and what attention or a feed-forward holds by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.parameters import is_moe_layer, stated
from glowplug.core.plan.proposal import Draft
from glowplug.core.plugin.byte_costs import SHOWN, AttentionStep, ExpertsStep, Work, gated_rows
from glowplug.core.plugin.component import Chosen
from glowplug.core.plugin.offers import AttentionOffers, OpsOffers, QuantizationOffers
from glowplug.core.plugin.options import QuantizationOptions

INDICES = 40  #: bytes a token of ids, positions and slots, as they are sent and as layers read them


@dataclass(frozen=True)
class StepTokens:
    """``own``: tokens of this rank's group; ``gathered``: of all groups, which feed-forward layers
    work on; ``longest`` of one row, behind ``cached`` ones."""

    own: int
    gathered: int
    longest: int
    cached: int = 0


class LayerBytes:
    """Formulas of one plan under construction."""

    def __init__(self, draft: Draft) -> None:
        self.model = draft.facts.model
        self.mesh = draft.values["mesh"]
        values = draft.values
        self.dtype: str = values["dtype"]
        self.element: int = DTYPE_BYTES[self.dtype]
        devices = draft.facts.hardware.devices
        self._card, self._compute = (devices[0].name, devices[0].compute) if devices else ("", 0)
        self.alone = values["ranks"] == 1
        self._packages = draft.facts.software.packages
        attention = draft.first("attention")
        scheme = draft.first("quantization")
        ops = draft.first("ops")
        self._attention = (
            attention.offers
            if attention and isinstance(attention.offers, AttentionOffers)
            else AttentionOffers()
        )
        self._ops = ops.offers if ops and isinstance(ops.offers, OpsOffers) else OpsOffers()
        self._scheme, self._cast = _scheme(scheme, values["device"])
        self._options = scheme.options if scheme else None
        self._grows: bool = values["growing_segments"]
        self.heads = -(-self.model.num_heads // axis_size("attn_tp", self.mesh))
        self.rope = self.model.qk_rope_head_dim or self.model.head_dim
        self.value = stated(self.model, "v_head_dim", self.model.head_dim)
        self.key = (
            stated(self.model, "qk_nope_head_dim", 128) + self.rope
            if self.latent
            else self.model.head_dim
        )

    @property
    def latent(self) -> bool:
        return self.model.kind == "mla"

    def claimed(self, tokens: int) -> int:
        """What torch's allocator takes for a step of so many tokens on every rank, without the
        blocks' own granularity.
        """
        gathered = tokens * self.mesh.get("dp", 1)
        mixed = any(is_moe_layer(self.model, layer) for layer in range(self.model.num_layers))
        extra = self.experts(gathered).extra if mixed and not self._grows else 0
        return self.activations(StepTokens(tokens, gathered, tokens)) + extra

    def activations(self, step: StepTokens) -> int:
        """The most that a step's layers hold, its indices and rotations among it."""
        model = self.model
        hidden = self.model.hidden_size
        stream = step.own * hidden * self.element
        normed = self.cast(step.own, hidden)
        most = 0
        # what the layer's caller holds
        before = stream
        kept = 0
        seen = set[tuple[bool, int, int]]()
        for layer in range(model.num_layers):
            moe = is_moe_layer(model, layer)
            if (moe, before, kept) in seen:
                continue
            seen.add((moe, before, kept))
            work = self.experts(step.gathered) if moe else self.dense(step.gathered)
            read = self.both(step.gathered) if moe else self.cast(step.gathered, hidden)
            most = max(
                most,
                before + kept + (stream if layer else 0) + normed + self.attention(step),
                before + kept + stream + read + work.most,
            )
            before = work.left
            kept = stream
        return most + step.own * (INDICES + self.rope * SHOWN)

    def cast(self, tokens: int, size: int) -> int:
        """``tokens`` of ``size`` numbers as linear layers read them."""
        return int(tokens * size * (self._cast or self.element))

    def both(self, tokens: int) -> int:
        """As the gate reads them, and as experts do where that differs."""
        plain = tokens * self.model.hidden_size * self.element
        return plain + (self.cast(tokens, self.model.hidden_size) if self._cast else 0)

    # ---- attention -------------------------------------------------------------------------------

    def attention(self, step: StepTokens) -> int:
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
            held = (
                tokens * (query + 2 * keys + query + keys) * element
            )  # projected, and what is rotated of it
            return held + max(work, output)
        lora = stated(model, "q_lora_rank")
        projected = tokens * ((lora or query) + entry) * element
        queries = tokens * query * element if lora else 0
        return projected + max(queries + work, queries + self.cast(tokens, lora), output)

    # ---- feed-forward ----------------------------------------------------------------------------

    def dense(self, tokens: int) -> Work:
        return self._gated(
            tokens,
            -(
                -stated(self.model, "intermediate_size", 4 * self.model.hidden_size)
                // axis_size("tp", self.mesh)
            ),
        )

    def _gated(self, tokens: int, width: int) -> Work:
        """Gate and up, then their product, then the layer's output."""
        out = tokens * self.model.hidden_size * self.element
        inner = self.cast(tokens, width)
        return Work(max(2 * tokens * width * self.element + inner, inner + out), out)

    def experts(self, tokens: int) -> Work:
        model = self.model
        inter = -(-stated(model, "moe_intermediate_size") // axis_size("moe_tp", self.mesh))
        count = -(-model.n_routed_experts // axis_size("ep", self.mesh))
        shared = stated(model, "n_shared_experts")
        riding = shared if self.alone and "route" in self._ops.ops and self._scheme.rides else 0
        chosen = stated(model, "num_experts_per_tok") + riding
        step = ExpertsStep(
            tokens,
            chosen,
            count + riding,
            riding,
            model.hidden_size,
            inter,
            self.element,
            self._ops.adds_parts and self.alone and riding == shared,
            self._options,
            self._packages,
            self.dtype,
            self._card,
            self._compute,
        )
        work = (self._scheme.experts_work or gated_rows)(step)
        routed = step.pairs * 2 * SHOWN
        if riding == shared:
            return Work(routed + work.most, work.left, work.extra)
        beside = self._gated(tokens, shared * inter)
        return Work(routed + max(work.most, work.left + beside.most), work.left, work.extra)


def _scheme(chosen: Chosen | None, device: str) -> tuple[QuantizationOffers, float]:
    """What the scheme offers, and bytes a number as its products read activations; 0: in the
    compute dtype.
    """
    if chosen is None or not isinstance(chosen.offers, QuantizationOffers):
        return QuantizationOffers(), 0.0
    offers = chosen.offers
    options = chosen.options
    dequantizes = isinstance(options, QuantizationOptions) and options.dequantizes(device, offers)
    return offers, 0.0 if dequantizes else offers.cast_bytes
