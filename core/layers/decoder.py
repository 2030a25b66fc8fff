"""A pre-norm decoder layer, and the stack of them that most language models are."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from torch import Tensor

from glowplug.core.layers.attention import MhaAttention, MlaAttention
from glowplug.core.layers.embedding import Embedding, LmHead, TiedHead
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.module import Module
from glowplug.core.layers.moe import Moe
from glowplug.core.layers.norm import RmsNorm
from glowplug.core.layers.rope import Rope
from glowplug.core.protocols import Parts
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Batch, Ends
from glowplug.core.step.to_device import rows_at


class DecoderLayer(Module):
    """attention then feed-forward, each behind a norm that also adds the residual."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden: int,
        eps: float,
        attention: MlaAttention | MhaAttention,
        feed_forward: Mlp | Moe,
    ) -> None:
        self.attention = attention
        self.feed_forward = feed_forward
        local = context.worker.ranks == 1 or feed_forward.exchanges
        self.input_norm = RmsNorm(context, f"{name}.input_layernorm", hidden, eps, attention)
        self.post_norm = RmsNorm(
            context,
            f"{name}.post_attention_layernorm",
            hidden,
            eps,
            *([feed_forward] if local else []),
        )
        self._parallel = None if local else context.parallel

    def forward(
        self, x: Tensor | Parts, residual: Tensor | None, at: object, batch: Batch
    ) -> tuple[Tensor | Parts, Tensor]:
        """x [T, hidden] and the sum it has yet to be added to (None: x itself) -> the same for the
        next layer.
        """
        normed, residual = self.input_norm.add(x, residual)
        normed, residual = self.post_norm.add(self.attention.forward(normed, at), residual)
        if self._parallel is None:
            return self.feed_forward.forward(normed, batch), residual
        y = self.feed_forward.forward(self._parallel.leave_attention(normed, batch), batch)
        assert isinstance(y, Tensor), "ranks exchange sums"
        return self._parallel.enter_attention(y, batch), residual

    def fill(self, stream: Tensor, at: object, slots: Tensor) -> None:
        """Cache keys and values of stream [T, hidden], and no more."""
        assert isinstance(self.attention, MlaAttention)
        self.attention.fill(self.input_norm.forward(stream), at, slots)

    def ends(
        self, stream: Tensor, at: object, slots: Tensor, ends: Ends, ends_at: object
    ) -> tuple[Tensor | Parts, Tensor]:
        """As ``forward`` for the tokens of ``ends`` alone; keys and values of all of stream [T,
        hidden] are cached.

        at, ends_at: rope rows of all and of the ends; slots int64 [T]. Needs latent attention.
        """
        assert isinstance(self.attention, MlaAttention)
        normed, residual = self.input_norm.add(stream, None)
        attended = self.attention.forward_ends(normed, at, slots, ends, ends_at)
        normed, residual = self.post_norm.add(attended, rows_at(residual, ends.tokens))
        return self.feed_forward.forward(normed, ends.batch), residual


class DecoderModel(Module):
    """Embedding, layers, final norm, head: everything of ``protocols.Model`` but ``ignored``.

    ``layers`` makes each layer's parts; checkpoint names start with ``model.`` and the head is
    ``lm_head``.
    """

    def __init__(
        self,
        context: BuildContext,
        layers: Callable[[BuildContext, str, int], DecoderLayer],
        rope: Rope,
        eps: float,
        tied: bool,
    ) -> None:
        facts = context.facts
        hidden = facts.hidden_size
        vocab = facts.vocab_size
        self.embed = Embedding(context, "model.embed_tokens", vocab, hidden)
        self.layers = [layers(context, f"model.layers.{i}", i) for i in range(facts.num_layers)]
        self.norm = RmsNorm(context, "model.norm", hidden, eps)
        self.rope = rope
        self.head = (
            TiedHead(context, "lm_head", self.embed)
            if tied
            else LmHead(context, "lm_head", vocab, hidden)
        )
        self.num_layers = facts.num_layers
        self.tied = tied
        self._elsewhere = frozenset(self.elsewhere())

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """int64 [T], int64 [T] -> normed hidden states [T, hidden]."""
        return self.norm.add(*self._through(self.layers, input_ids, positions, batch))[0]  # type: ignore[no-any-return]

    def _through(
        self, layers: Seq[DecoderLayer], input_ids: Tensor, positions: Tensor, batch: Batch
    ) -> tuple[Tensor | Parts, Tensor | None]:
        at = self.rope.at(positions)
        x: Tensor | Parts = self.embed.forward(input_ids)
        residual = None
        for layer in layers:
            x, residual = layer.forward(x, residual, at, batch)
        return x, residual

    def trunk(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See ``protocols.SampledLastLayer``.

        NOTE: the last layer's norm adds up what ``tail`` begins with, and norms it once more there:
        0.1% of a prompt. An op that only adds up would spare a tenth of that: it reads the same
        parts and writes the same sum.
        """
        x, residual = self._through(self.layers[:-1], input_ids, positions, batch)
        return self.layers[-1].input_norm.add(x, residual)[1]

    def tail(self, stream: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See ``protocols.SampledLastLayer``."""
        last = self.layers[-1]
        at = self.rope.at(positions)
        ends = batch.ends
        if ends is None:
            return self.norm.add(*last.forward(stream, None, at, batch))[0]  # type: ignore[no-any-return]
        if not ends.count:
            last.fill(stream, at, batch.slots)
            return stream[:0]
        x, residual = last.ends(stream, at, batch.slots, ends, self.rope.at(ends.batch.positions))
        return self.norm.add(x, residual)[0][: ends.count]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, V]."""
        return self.head.forward(hidden)

    def ignored(self, name: str) -> bool:
        """Layers beyond the last (multi-token prediction), rotary tables, a head that is tied
        anyway, and the experts of other ranks."""
        if name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight"):
            return True
        if name.rpartition(".")[0] in self._elsewhere:
            return True
        parts = name.split(".")
        return (
            len(parts) > 3
            and parts[:2] == ["model", "layers"]
            and parts[2].isdigit()
            and int(parts[2]) >= self.num_layers
        )
