"""A pre-norm decoder layer, and the stack of them that most language models are."""
from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from glowplug.core.batch import Batch
from glowplug.core.build import BuildContext
from glowplug.core.layers.attention import MhaAttention, MlaAttention
from glowplug.core.layers.embedding import Embedding, LmHead, TiedHead
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.module import Module
from glowplug.core.layers.moe import Moe
from glowplug.core.layers.norm import RmsNorm
from glowplug.core.layers.rope import Rope
from glowplug.core.protocols import Parts


class DecoderLayer(Module):
    """attention then feed-forward, each behind a norm that also adds the residual."""

    def __init__(self, context: BuildContext, name: str, hidden: int, eps: float,
                 attention: MlaAttention | MhaAttention, feed_forward: Mlp | Moe) -> None:
        self.attention, self.feed_forward = attention, feed_forward
        local = context.worker.ranks == 1 or feed_forward.exchanges
        self.input_norm = RmsNorm(context, f"{name}.input_layernorm", hidden, eps, attention)
        self.post_norm = RmsNorm(context, f"{name}.post_attention_layernorm", hidden, eps,
                                 *([feed_forward] if local else []))
        self._parallel = None if local else context.parallel

    def forward(self, x: Tensor | Parts, residual: Tensor | None, at: object,
                batch: Batch) -> tuple[Tensor | Parts, Tensor]:
        """x [T, hidden] and the sum it has yet to be added to (None: x itself) -> the same for the next layer."""
        normed, residual = self.input_norm.add(x, residual)
        normed, residual = self.post_norm.add(self.attention.forward(normed, at), residual)
        if self._parallel is None:
            return self.feed_forward.forward(normed, batch), residual
        y = self.feed_forward.forward(self._parallel.leave_attention(normed, batch), batch)
        assert isinstance(y, Tensor), "ranks exchange sums"
        return self._parallel.enter_attention(y, batch), residual


class DecoderModel(Module):
    """Embedding, layers, final norm, head: everything of ``protocols.Model`` but ``ignored``.

    ``layers`` makes each layer's parts; checkpoint names start with ``model.`` and the head is ``lm_head``.
    """

    def __init__(self, context: BuildContext, layers: Callable[[BuildContext, str, int], DecoderLayer], rope: Rope,
                 eps: float, tied: bool) -> None:
        facts = context.facts
        hidden, vocab = facts.hidden_size, facts.vocab_size
        self.embed = Embedding(context, "model.embed_tokens", vocab, hidden)
        self.layers = [layers(context, f"model.layers.{i}", i) for i in range(facts.num_layers)]
        self.norm = RmsNorm(context, "model.norm", hidden, eps)
        self.rope = rope
        self.head = TiedHead(context, "lm_head", self.embed) if tied else LmHead(context, "lm_head", vocab, hidden)
        self.num_layers, self.tied = facts.num_layers, tied
        self._elsewhere = frozenset(self.elsewhere())

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """int64 [T], int64 [T] -> normed hidden states [T, hidden]."""
        at = self.rope.at(positions)
        x: Tensor | Parts = self.embed.forward(input_ids)
        residual = None
        for layer in self.layers:
            x, residual = layer.forward(x, residual, at, batch)
        return self.norm.add(x, residual)[0]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, V]."""
        return self.head.forward(hidden)

    def ignored(self, name: str) -> bool:
        """Layers beyond the last (multi-token prediction), rotary tables, a head that is tied anyway, and the experts
        of other ranks."""
        if name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight"):
            return True
        if name.rpartition(".")[0] in self._elsewhere:
            return True
        parts = name.split(".")
        return (len(parts) > 3 and parts[:2] == ["model", "layers"] and parts[2].isdigit()
                and int(parts[2]) >= self.num_layers)
