"""A differentiable DeepSeek-V3 for training.

MLA, group-limited sigmoid routing, a shared expert, one MTP layer. All experts are computed for
every token and weighted by the router (zero for those not chosen): at this size one wide GEMM is
faster than dispatch, and the function is the same.

Shapes: B sequences, T tokens, D hidden.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glowplug.models.embedded.training.fp8 import fake_activation, fake_weight
from glowplug.models.embedded.training.shape import NetworkShape


def yarn_frequencies(shape: NetworkShape, fast: float = 32.0, slow: float = 1.0) -> Tensor:
    """Return inverse rotary frequencies [rope / 2] with YaRN interpolation.

    Source: https://arxiv.org/abs/2309.00071.
    """

    def turns_to_dim(turns: float) -> float:
        wave = shape.trained_context / (turns * 2 * math.pi)
        return shape.rope * math.log(wave) / (2 * math.log(shape.rope_theta))

    base = shape.rope_theta ** (-torch.arange(0, shape.rope, 2, dtype=torch.float32) / shape.rope)
    low = max(math.floor(turns_to_dim(fast)), 0)
    high = min(math.ceil(turns_to_dim(slow)), shape.rope - 1)
    ramp = (
        (torch.arange(shape.rope // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ).clamp(0, 1)
    return base / shape.yarn_factor * ramp + base * (1 - ramp)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs of x [B, T, heads, rope] by the angles [T, 1, rope / 2]."""
    even = x[..., 0::2].float()
    odd = x[..., 1::2].float()
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)


class TrainingLinear(nn.Module):
    """A bias-free projection; with `quantized` it computes in W8A8 block FP8."""

    def __init__(self, inputs: int, outputs: int, *, zero: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (0.0 if zero else inputs**-0.5))
        self.quantized = False

    def forward(self, x: Tensor) -> Tensor:
        if self.quantized:
            return F.linear(fake_activation(x), fake_weight(self.weight))
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.epsilon)


class Attention(nn.Module):
    """Multi-head latent attention with low-rank queries, un-absorbed."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_a_proj = TrainingLinear(shape.hidden, shape.q_rank)
        self.q_a_layernorm = RMSNorm(shape.q_rank, shape.epsilon)
        self.q_b_proj = TrainingLinear(shape.q_rank, shape.heads * (shape.nope + shape.rope))
        self.kv_a_proj_with_mqa = TrainingLinear(shape.hidden, shape.kv_rank + shape.rope)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, shape.epsilon)
        self.kv_b_proj = TrainingLinear(shape.kv_rank, shape.heads * (shape.nope + shape.value))
        self.o_proj = TrainingLinear(shape.heads * shape.value, shape.hidden, zero=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        s = self.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(
            -1, (s.heads, s.nope + s.rope)
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((s.kv_rank, s.rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (s.heads, s.nope + s.value))
        k_nope, v = kv.split((s.nope, s.value), dim=-1)
        q_nope, q_rope = q.split((s.nope, s.rope), dim=-1)
        k_rope = rotate(k_rope.unsqueeze(-2), cos, sin).expand(*k_nope.shape[:-1], s.rope)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), dim=-1).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), attn_mask=mask, scale=s.softmax_scale
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward module (SwiGLU)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = TrainingLinear(hidden, width)
        self.up_proj = TrainingLinear(hidden, width)
        self.down_proj = TrainingLinear(width, hidden, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """The gate of DeepSeek-V3 ("noaux_tc"): it chooses experts by sigmoid scores.

    The correction bias affects only the choice of experts, never their weights.
    """

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.experts, shape.hidden) * shape.hidden**-0.5)
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))
        self.load: Tensor
        self.register_buffer("load", torch.zeros(shape.experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return each token's weights of all experts, [B, T, experts].

        Experts that are not chosen have weight 0; the others' weights sum to `routed_scale`.
        """
        s = self.shape
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        grouped = (scores.detach() + self.e_score_correction_bias).unflatten(-1, (s.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        allowed = (
            torch.zeros_like(best).scatter(-1, best.topk(s.top_groups, dim=-1).indices, 1.0).bool()
        )
        candidates = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen = torch.zeros_like(scores).scatter(
            -1, candidates.topk(s.top_experts, dim=-1).indices, 1.0
        )
        if self.training:
            self.load.copy_(chosen.sum(dim=(0, 1)))
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.routed_scale


class MoE(nn.Module):
    """Routed experts as one wide SwiGLU (weights [experts, out, in]), plus the shared expert."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        count = shape.experts
        width = shape.expert_width
        hidden = shape.hidden
        self.gate = Router(shape)
        self.experts_gate = nn.Parameter(torch.randn(count, width, hidden) * hidden**-0.5)
        self.experts_up = nn.Parameter(torch.randn(count, width, hidden) * hidden**-0.5)
        self.experts_down = nn.Parameter(torch.zeros(count, hidden, width))
        self.shared_experts = MLP(hidden, width)
        self.quantized = False

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.experts_gate
        up: Tensor = self.experts_up
        down: Tensor = self.experts_down
        rows = x
        if self.quantized:
            gate = fake_weight(gate)
            up = fake_weight(up)
            down = fake_weight(down)
            rows = fake_activation(x)
        inner = F.silu(F.linear(rows, gate.flatten(0, 1))) * F.linear(rows, up.flatten(0, 1))
        weighted = inner.unflatten(-1, (gate.shape[0], -1)) * self.gate(x).unsqueeze(-1).to(
            inner.dtype
        )
        weighted = weighted.flatten(-2)
        if self.quantized:
            weighted = fake_activation(weighted)
        return F.linear(weighted, down.transpose(0, 1).flatten(1)) + self.shared_experts(x)


class TrainingBlock(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: NetworkShape, *, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.mlp = MLP(shape.hidden, shape.dense_width) if dense else MoE(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class TrainingNextN(nn.Module):
    """The multi-token-prediction layer: from h(i) and token i+1 it predicts token i+2."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.enorm = RMSNorm(shape.hidden, shape.epsilon)
        self.hnorm = RMSNorm(shape.hidden, shape.epsilon)
        self.eh_proj = TrainingLinear(2 * shape.hidden, shape.hidden)
        self.block = TrainingBlock(shape, dense=False)
        self.norm = RMSNorm(shape.hidden, shape.epsilon)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.norm(self.block(x, cos, sin, mask))


class Network(nn.Module):
    """The whole model: embedding, decoder layers, final norm, head and MTP layer.

    It returns hidden states after the final norm, the input of the head and of the MTP layer.
    """

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(
            TrainingBlock(shape, dense=i < shape.dense_layers) for i in range(shape.layers)
        )
        self.norm = RMSNorm(shape.hidden, shape.epsilon)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.nextn = TrainingNextN(shape)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.frequencies: Tensor
        self.register_buffer("frequencies", yarn_frequencies(shape), persistent=False)

    def quantize(self, on: bool) -> None:
        """Switch W8A8 on or off for every projection that ships in FP8.

        The MTP layer's eh_proj ships in bf16.
        """
        for module in self.modules():
            if isinstance(module, (TrainingLinear, MoE)) and module is not self.nextn.eh_proj:
                module.quantized = on

    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary angles of T positions, each [T, 1, rope / 2]."""
        turns = torch.outer(
            torch.arange(length, device=self.frequencies.device).float(), self.frequencies
        )
        return turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)

    def forward(self, tokens: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden, MTP hidden), each [B, T, D].

        The MTP hidden state of the last position has no next token and is meaningless.

        Args:
            tokens: [B, T].
            documents: [B, T]; attention stays within a document.
        """
        length = tokens.shape[1]
        cos, sin = self.angles(length)
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        mask = ((documents.unsqueeze(1) == documents.unsqueeze(2)) & causal).unsqueeze(1)
        embedded = self.embed_tokens(tokens)
        x = embedded
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        hidden = self.norm(x)
        ahead = self.nextn(embedded.roll(-1, dims=1), hidden, cos, sin, mask)
        return hidden, ahead
