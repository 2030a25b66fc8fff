"""A differentiable EAGLE-3 head with attention of any kind, for training.

The head reads the residual stream of the target after some of its layers. Its published form has
one decoder layer, whose attention input is the normed embedding beside the normed hidden state.
Embedding and output head are the target's. Source: EAGLE-3, arXiv 2503.01840.

Shapes: B sequences, T tokens, D hidden, H heads, S tokens of a sequence after which is drafted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glowplug.models.embedded.training.network import MLP, RMSNorm, TrainingLinear

Angles = tuple[Tensor, Tensor]  # cosines and sines
Chain = list[tuple[Tensor, Tensor]]  # keys and values of each pass


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of a head.

    Attributes:
        hidden: size of the target's hidden states.
        width: width of the feed-forward part.
        features: number of target layers after which features are read.
        epsilon: epsilon of the norms.
    """

    hidden: int
    width: int
    features: int
    epsilon: float


class ChainedAttention:
    """Attention over the target's tokens and over the drafts of each token's own chain.

    A mixin for modules with the output projection ``o_proj``.

    Attributes:
        scale: softmax scale.
    """

    scale: float
    o_proj: TrainingLinear

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        """Return the queries [B, H, S, channels] of x [B, S, 2 D]."""
        raise NotImplementedError

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [B, H, T, channels], of x [B, T, 2 D]."""
        raise NotImplementedError

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
        scores = torch.where(mask, (q @ first[0].mT) * self.scale, -torch.inf)
        own = [(q * keys).sum(-1, keepdim=True) * self.scale for keys, _ in chain]
        shares = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(q.dtype)
        length = scores.shape[-1]
        out = shares[..., :length] @ first[1]
        for number, (_, values) in enumerate(chain):
            out = out + shares[..., length + number, None] * values
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return result


class TrainingEagleHead(nn.Module):
    """The head: features to hidden state, one layer, final norm."""

    def __init__(self, sizes: HeadSizes, attention: ChainedAttention) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.fc = TrainingLinear(sizes.features * hidden, hidden)
        self.input_layernorm = RMSNorm(hidden, sizes.epsilon)
        self.hidden_norm = RMSNorm(hidden, sizes.epsilon)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden, sizes.epsilon)
        self.mlp = MLP(hidden, sizes.width)
        self.norm = RMSNorm(hidden, sizes.epsilon)

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
        first = self.self_attn.keys_values(x, _angles_of(features, frequencies))
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

    def _after(self, stream: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the layer, from its attention's result."""
        stream = stream + attended
        after: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return after

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


def _angles_of(features: Tensor, frequencies: Tensor) -> Angles:
    """Return the rotary angles of all tokens in the first pass."""
    return _angles(torch.arange(1, features.shape[1] + 1, device=features.device), frequencies)


def _angles(places: Tensor, frequencies: Tensor) -> Angles:
    """Return cosines and sines of the rotary angles of ``places`` [..., T]: [..., T, 1, N]."""
    turns = places.unsqueeze(-1).float() * frequencies
    return turns.cos().unsqueeze(-2), turns.sin().unsqueeze(-2)
