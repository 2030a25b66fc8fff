"""A pre-norm decoder layer, and the decoder-only model made of such layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from glowplug.core.facts.decoder_names import PUBLISHED, DecoderNames
from glowplug.core.facts.weight_classes import TARGET, next_token_layer
from glowplug.core.layers.attention import MlaAttention
from glowplug.core.layers.embedding import Embedding, LmHead, TiedHead
from glowplug.core.layers.linear import Terms
from glowplug.core.layers.mha import MhaAttention
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.module import Module
from glowplug.core.layers.moe import Moe
from glowplug.core.layers.norm import RmsNorm
from glowplug.core.layers.rope import Rope
from glowplug.core.protocols import VocabularySlices
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Batch, Ends
from glowplug.core.step.to_device import rows_at


class DecoderLayer(Module):
    """Attention, then feed-forward, each after a norm that also adds the residual."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden: int,
        eps: float,
        attention: MlaAttention | MhaAttention,
        feed_forward: Mlp | Moe,
        names: DecoderNames = PUBLISHED,
    ) -> None:
        self.attention = attention
        self.feed_forward = feed_forward
        local = not context.parallel.moves_tokens or feed_forward.exchanges
        first, second = names.norms
        self.input_norm = RmsNorm(context, f"{name}.{first}", hidden, eps, attention)
        self.post_norm = RmsNorm(
            context, f"{name}.{second}", hidden, eps, *([feed_forward] if local else [])
        )
        self._parallel = None if local else context.parallel

    def forward(
        self, x: Terms, residual: Tensor | None, at: object, batch: Batch
    ) -> tuple[Terms, Tensor]:
        """Run the layer.

        Args:
            x: [T, hidden], not yet added to the residual stream.
            residual: residual stream [T, hidden]; None: x is the stream.
            at: the step's RoPE rows.
            batch: the step.

        Returns:
            x and residual for the next layer.
        """
        # NOTE: the second assignment frees the normed input, whose memory the other module reuses
        normed, residual = self.input_norm.add(x, residual)
        normed, residual = self.post_norm.add(self.attention.forward(normed, at), residual)
        return self._feed_forward(normed, batch), residual

    def forward_with_stream(
        self, x: Terms, residual: Tensor | None, at: object, batch: Batch
    ) -> tuple[Terms, Tensor, Tensor]:
        """Run the layer as ``forward`` does, and return the stream before it, [T, hidden], too."""
        normed, stream = self.input_norm.add(x, residual)
        normed, residual = self.post_norm.add(self.attention.forward(normed, at), stream)
        return self._feed_forward(normed, batch), residual, stream

    def forward_normed(
        self, normed: Any, residual: Tensor, at: object, batch: Batch
    ) -> tuple[Terms, Tensor]:
        """Run the layer after its input norm; the result is that of ``forward``.

        Args:
            normed: input of the attention, plain or in its ``input_format``.
            residual: residual stream [T, hidden].
            at: the step's RoPE rows.
            batch: the step.
        """
        normed, residual = self.post_norm.add(self.attention.forward(normed, at), residual)
        return self._feed_forward(normed, batch), residual

    def _feed_forward(self, normed: Any, batch: Batch) -> Terms:
        """Run the feed-forward module, for the tokens that this rank computes there."""
        if self._parallel is None:
            return self.feed_forward.forward(normed, batch)
        y = self.feed_forward.forward(self._parallel.leave_attention(normed, batch), batch)
        assert isinstance(y, Tensor), "the ranks' strategies take complete sums only"
        return self._parallel.enter_attention(y, batch)

    def fill(self, stream: Tensor, at: object, kv_slots: Tensor) -> None:
        """Store the keys and values of stream [T, hidden] in the cache, without attention.

        Args:
            stream: residual stream before this layer, [T, hidden].
            at: the step's RoPE rows.
            kv_slots: KV slots of the tokens, int64 [T].
        """
        self.attention.fill(self.input_norm.forward(stream), at, kv_slots)

    def ends(
        self, stream: Tensor, at: object, kv_slots: Tensor, ends: Ends, ends_at: object
    ) -> tuple[Terms, Tensor]:
        """Run the layer for the tokens of ``ends`` only; keys and values of all tokens are cached.

        This needs latent attention.

        Args:
            stream: residual stream before this layer, [T, hidden].
            at: RoPE rows of all tokens.
            kv_slots: KV slots of all tokens, int64 [T].
            ends: the end tokens.
            ends_at: RoPE rows of the end tokens.

        Returns:
            x and residual, as ``forward`` returns them, of the end tokens.
        """
        assert isinstance(self.attention, MlaAttention)
        normed, residual = self.input_norm.add(stream, None)
        attended = self.attention.forward_ends(normed, at, kv_slots, ends, ends_at)
        normed, residual = self.post_norm.add(attended, rows_at(residual, ends.tokens))
        return self.feed_forward.forward(normed, ends.batch), residual


class DecoderModel(Module):
    """Embedding, layers, final norm and head: a ``protocols.Model``.

    Args:
        layers: function (context, name, number) -> decoder layer.
        rope: rotary embedding of all layers.
        eps: epsilon of the final norm.
        tied: True: the head's weight is the embedding's.
        names: names of the modules in the checkpoint.
    """

    def __init__(
        self,
        context: BuildContext,
        layers: Callable[[BuildContext, str, int], DecoderLayer],
        rope: Rope,
        eps: float,
        tied: bool,
        names: DecoderNames = PUBLISHED,
    ) -> None:
        facts = context.facts
        hidden = facts.hidden_size
        vocab = facts.vocab_size
        self.names = names
        self.embed = Embedding(context, names.embedding, vocab, hidden)
        self.layers = [
            layers(context, names.layer.format(layer=i), i) for i in range(facts.num_layers)
        ]
        self.norm = RmsNorm(context, names.norm, hidden, eps)
        self.rope = rope
        self.head = (
            TiedHead(context, names.head, self.embed)
            if tied
            else LmHead(context, names.head, vocab, hidden)
        )
        self.num_layers = facts.num_layers
        self.tied = tied
        self._hidden = hidden
        self._feature_layers: tuple[int, ...] = ()
        self._elsewhere = frozenset(self.elsewhere())

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The numbers of layers after which ``forward`` returns the residual stream."""
        return self._feature_layers

    def keep_features(self, layers: Seq[int]) -> None:
        """Append features of each token to the hidden states that ``forward`` returns.

        The features are the residual stream after the given numbers of layers. ``forward`` then
        returns [T, (1 + len(layers)) * hidden]; the first ``hidden`` columns are unchanged.

        Args:
            layers: numbers of layers, from 0 to all.
        """
        self._feature_layers = tuple(layers)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Return the normed hidden states [T, hidden] of input_ids and positions, int64 [T].

        Features follow them in each row if a draft model reads any (``keep_features``).
        """
        if self._feature_layers:
            return self._with_features(input_ids, positions, batch)
        x, residual = self._through(self.layers, input_ids, positions, batch)
        normed: Tensor = self.norm.add(x, residual)[0]
        return normed

    def _with_features(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Return normed hidden states and features, [T, (1 + features) * hidden]."""
        at = self.rope.at(positions)
        x: Terms = self.embed.forward(input_ids)
        residual: Tensor | None = None
        streams: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            if number in self._feature_layers:
                x, residual, streams[number] = layer.forward_with_stream(x, residual, at, batch)
            else:
                x, residual = layer.forward(x, residual, at, batch)
        normed, streams[self.num_layers] = self.norm.add(x, residual)
        return torch.cat([normed, *(streams[number] for number in self._feature_layers)], dim=-1)

    def _through(
        self, layers: Seq[DecoderLayer], input_ids: Tensor, positions: Tensor, batch: Batch
    ) -> tuple[Terms, Tensor | None]:
        """Run the embedding and ``layers``; return x and residual as a layer does."""
        at = self.rope.at(positions)
        x: Terms = self.embed.forward(input_ids)
        residual = None
        for layer in layers:
            x, residual = layer.forward(x, residual, at, batch)
        return x, residual

    def trunk(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run all layers before the last one; see ``protocols.SampledLastLayer``.

        NOTE: the last layer's input norm adds the residual here; its normed result is dropped, and
        ``tail`` norms the sum again. This takes 0.1% of a prompt's time. An op that only adds
        would save a tenth of that.
        """
        x, residual = self._through(self.layers[:-1], input_ids, positions, batch)
        return self.layers[-1].input_norm.add(x, residual)[1]

    def tail(self, stream: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run the last layer; see ``protocols.SampledLastLayer``."""
        last = self.layers[-1]
        at = self.rope.at(positions)
        ends = batch.ends
        if ends is None:
            x, residual = last.forward(stream, None, at, batch)
            normed: Tensor = self.norm.add(x, residual)[0]
            return normed
        if not ends.count:
            last.fill(stream, at, batch.kv_slots)
            return stream[:0]
        x, residual = last.ends(
            stream, at, batch.kv_slots, ends, self.rope.at(ends.batch.positions)
        )
        normed = self.norm.add(x, residual)[0]
        return normed[: ends.count]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [N, V], of hidden states [N, hidden] or wider.

        Columns after the first ``hidden`` ones are features, which the head does not read.
        """
        return self.head.forward(self._without_features(hidden))

    @property
    def slices(self) -> VocabularySlices | None:
        """The division of the vocabulary among ranks; None: every rank computes all logits."""
        return self.head.slices

    def sliced_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's slice, float32 [N, size], of hidden states."""
        return self.head.sliced_logits(self._without_features(hidden))

    def _without_features(self, hidden: Tensor) -> Tensor:
        return hidden[:, : self._hidden].contiguous() if self._feature_layers else hidden

    def ignored(self, name: str) -> bool:
        """Return whether a checkpoint tensor without a target may be left unread.

        Such tensors are layers beyond the last (multi-token prediction), rotary tables, a tied
        head, and the experts of other ranks.
        """
        if name.endswith("rotary_emb.inv_freq") or (
            self.tied and name == f"{self.names.head}.weight"
        ):
            return True
        if name.rpartition(".")[0] in self._elsewhere:
            return True
        return next_token_layer(name, self.num_layers, self.names.layer_prefix) != TARGET
