"""A differentiable EAGLE-3 head in the form of DeepSeek's latent attention, for training.

The head reads the residual stream of the target after some of its layers. Its published form has
one decoder layer, whose attention input is the normed embedding beside the normed hidden state.
Embedding and output head are the target's. Source: EAGLE-3, arXiv 2503.01840.

Shapes: B sequences, T tokens, D hidden, H heads, S tokens of a sequence after which is drafted.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from glowplug.models.embedded.training.network import (
    MLP,
    Attention,
    Network,
    RMSNorm,
    TrainingLinear,
    rotate,
)
from glowplug.models.embedded.training.shape import NetworkShape

Angles = tuple[Tensor, Tensor]  # cosines and sines
Chain = list[tuple[Tensor, Tensor]]  # keys and values of each pass
FEATURE_LAYERS = (1, 3, 5)  #: numbers of target layers after which features are read


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Dimensions of the head in which it differs from its target."""

    q_rank: int = 64
    width: int = 320


class HeadAttention(Attention):
    """Latent attention over the target's tokens and over the drafts of each token's own chain."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape)
        self.q_a_proj = TrainingLinear(2 * shape.hidden, shape.q_rank)
        self.kv_a_proj_with_mqa = TrainingLinear(2 * shape.hidden, shape.kv_rank + shape.rope)

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        """Return the queries [B, H, S, channels] of x [B, S, 2 D]."""
        s = self.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(
            -1, (s.heads, s.nope + s.rope)
        )
        q_nope, q_rope = q.split((s.nope, s.rope), dim=-1)
        return torch.cat((q_nope, rotate(q_rope, *angles)), dim=-1).transpose(1, 2)

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [B, H, T, channels], of x [B, T, 2 D]."""
        s = self.shape
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((s.kv_rank, s.rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (s.heads, s.nope + s.value))
        k_nope, v = kv.split((s.nope, s.value), dim=-1)
        k_rope = rotate(k_rope.unsqueeze(-2), *angles).expand(*k_nope.shape[:-1], s.rope)
        return torch.cat((k_nope, k_rope), dim=-1).transpose(1, 2), v.transpose(1, 2)

    def attend(
        self,
        q: Tensor,
        first: tuple[Tensor, Tensor],
        mask: Tensor,
        chain: Chain,
    ) -> Tensor:
        """Return the attention's result, [B, S, D], of queries [B, H, S, channels].

        Args:
            q: the queries.
            first: keys and values of the first pass, [B, H, T, channels].
            mask: bool [B, 1, S, T], the keys of the first pass that a query attends to.
            chain: keys and values of later passes, [B, H, S, channels]; a query attends to those
                of its own index.
        """
        scale = self.shape.softmax_scale
        scores = torch.where(mask, (q @ first[0].mT) * scale, -torch.inf)
        own = [(q * keys).sum(-1, keepdim=True) * scale for keys, _ in chain]
        shares = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(q.dtype)
        length = scores.shape[-1]
        out = shares[..., :length] @ first[1]
        for number, (_, values) in enumerate(chain):
            out = out + shares[..., length + number, None] * values
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class TrainingEagleHead(nn.Module):
    """The head: features to hidden state, one layer, final norm."""

    def __init__(self, target: NetworkShape, shape: HeadShape) -> None:
        super().__init__()
        hidden = target.hidden
        self.fc = TrainingLinear(len(FEATURE_LAYERS) * hidden, hidden)
        self.input_layernorm = RMSNorm(hidden, target.epsilon)
        self.hidden_norm = RMSNorm(hidden, target.epsilon)
        self.self_attn = HeadAttention(replace(target, q_rank=shape.q_rank))
        self.post_attention_layernorm = RMSNorm(hidden, target.epsilon)
        self.mlp = MLP(hidden, shape.width)
        self.norm = RMSNorm(hidden, target.epsilon)

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        frequencies: Tensor,
        mask: Tensor,
        chosen: Tensor,
        passes: int,
    ) -> list[Tensor]:
        """Return the normed hidden states of consecutive draft passes, each [B, S, D].

        Pass n reads the outputs of pass n - 1 in place of features, as drafting does.

        Args:
            embedded: embeddings of the tokens, [B, T, D].
            features: features of the tokens, [B, T, layers * D].
            frequencies: inverse rotary frequencies.
            mask: bool [B, 1, T, T], the tokens that each token attends to.
            chosen: int64 [B, S], indices of the tokens after which chains are drafted.
            passes: number of passes.
        """
        stream = self.fc(features)
        x = self._joined(embedded, stream, 1)
        first = self.self_attn.keys_values(x, self._angles_of(features, frequencies))
        near = taken(mask[:, 0], chosen).unsqueeze(1)
        x = taken(x, chosen)
        stream = taken(stream, chosen)
        chain: Chain = []
        results: list[Tensor] = []
        for number in range(1, passes + 1):
            angles = _angles(chosen + number, frequencies)
            if results:
                x = self._joined(embedded, stream, number, chosen)
                chain.append(self.self_attn.keys_values(x, angles))
            q = self.self_attn.queries(x, angles)
            stream = self._after(stream, self.self_attn.attend(q, first, near, chain))
            results.append(self.norm(stream))
        return results

    def _angles_of(self, features: Tensor, frequencies: Tensor) -> Angles:
        """Return the rotary angles of all tokens in the first pass."""
        places = torch.arange(1, features.shape[1] + 1, device=features.device)
        return _angles(places, frequencies)

    def _after(self, stream: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the layer, from its attention's result."""
        stream = stream + attended
        return stream + self.mlp(self.post_attention_layernorm(stream))

    def _joined(
        self, embedded: Tensor, stream: Tensor, ahead: int, chosen: Tensor | None = None
    ) -> Tensor:
        """Return the attention's input: embeddings ``ahead`` tokens later beside the stream.

        ``chosen``: indices of the tokens, [B, S]; None: all.
        """
        later = embedded.roll(-ahead, dims=1)
        later = later if chosen is None else taken(later, chosen)
        return torch.cat((self.input_layernorm(later), self.hidden_norm(stream)), dim=-1)


def taken(x: Tensor, chosen: Tensor) -> Tensor:
    """Return x[b, chosen[b]] for each row b: x [B, T, N], chosen [B, S] -> [B, S, N]."""
    return x.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _angles(places: Tensor, frequencies: Tensor) -> Angles:
    """Return cosines and sines of the rotary angles of ``places`` [..., T]: [..., T, 1, N]."""
    turns = places.unsqueeze(-1).float() * frequencies
    return turns.cos().unsqueeze(-2), turns.sin().unsqueeze(-2)


@torch.no_grad()
def target_states(network: Network, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's embeddings, features [B, T, layers * D] and normed hidden states.

    Args:
        network: the target.
        tokens: [B, T].
        mask: bool [B, 1, T, T], the tokens that each token attends to.
    """
    cos, sin = network.angles(tokens.shape[1])
    embedded = network.embed_tokens(tokens)
    x = embedded
    streams = []
    for number, layer in enumerate(network.layers, 1):
        x = layer(x, cos, sin, mask)
        if number in FEATURE_LAYERS:
            streams.append(x)
    return embedded, torch.cat(streams, dim=-1), network.norm(x)
