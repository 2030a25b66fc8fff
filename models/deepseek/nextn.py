"""DeepSeek-V3's multi-token-prediction layer (arXiv 2412.19437, section 2.2).

It is an extra layer in the checkpoint. At position i it reads the target's hidden state of token i
and the embedding of token i + 1, and predicts token i + 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.layers.decoder import DecoderModel
from glowplug.core.layers.embedding import Embedding, LmHead
from glowplug.core.layers.linear import Linear, Part
from glowplug.core.layers.module import Module
from glowplug.core.layers.norm import RmsNorm
from glowplug.core.protocols import VocabularySlices
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import PREVIOUS_HIDDEN, Batch
from glowplug.models.deepseek.config import DeepseekConfig
from glowplug.models.deepseek.layers import deepseek_layer, deepseek_rope


class DeepseekNextN(Module):
    """NextN layer ``number`` of a checkpoint, as a ``protocols.Model``.

    Its KV-pool layer is ``context.first_layer + number``. The embedding and the head are the
    target's unless the checkpoint has its own for this layer.
    """

    def __init__(self, context: BuildContext, target: DecoderModel, number: int = 0) -> None:
        facts = context.facts
        config = DeepseekConfig.read(facts)
        hidden = config.hidden
        self.layer_number = facts.num_layers + number
        self.prefix = f"model.layers.{self.layer_number}"
        self.own_embed = (
            Embedding(context, f"{self.prefix}.embed_tokens", facts.vocab_size, hidden)
            if f"{self.prefix}.embed_tokens.weight" in facts.tensors
            else None
        )
        self.own_head = (
            LmHead(context, f"{self.prefix}.shared_head.head", facts.vocab_size, hidden)
            if f"{self.prefix}.shared_head.head.weight" in facts.tensors
            else None
        )
        self._embed = (self.own_embed or target.embed).forward
        self._logits = (self.own_head or target.head).forward
        self.enorm = RmsNorm(context, f"{self.prefix}.enorm", hidden, config.eps)
        self.hnorm = RmsNorm(context, f"{self.prefix}.hnorm", hidden, config.eps)
        self.eh_proj = Linear(
            context,
            f"{self.prefix}.eh_proj",
            2 * hidden,
            [Part(f"{self.prefix}.eh_proj", hidden, "replicated")],
        )
        self.layer = deepseek_layer(
            context, config, self.prefix, self.layer_number, context.first_layer + number
        )
        self.norm = RmsNorm(context, f"{self.prefix}.shared_head.norm", hidden, config.eps)
        self.rope = deepseek_rope(context, config)
        self._elsewhere = frozenset(self.elsewhere())

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run the NextN layer on one batch.

        Args:
            input_ids: int64 [T], the token that follows each position.
            positions: int64 [T].
            batch: ``batch.extra[PREVIOUS_HIDDEN]`` has the target's hidden states [T, hidden].

        Returns:
            Normed hidden states [T, hidden], the input of ``logits`` and of a further NextN step.
        """
        x = self._joined(input_ids, batch.extra[PREVIOUS_HIDDEN])
        out, residual = self.layer.forward(x, None, self.rope.at(positions), batch)
        return self.norm.add(out, residual)[0]  # type: ignore[no-any-return]

    def fill(
        self, input_ids: Tensor, positions: Tensor, kv_slots: Tensor, previous: Tensor
    ) -> None:
        """Write the KV cache for tokens from which nothing is drafted.

        The model has only this layer, so later tokens need only the cache entries of these tokens.

        Args:
            input_ids: int64 [T], as in ``forward``.
            positions: int64 [T].
            kv_slots: int64 [T], KV slots.
            previous: [T, hidden], as ``batch.extra[PREVIOUS_HIDDEN]`` in ``forward``.
        """
        self.layer.fill(self._joined(input_ids, previous), self.rope.at(positions), kv_slots)

    def _joined(self, input_ids: Tensor, previous: Tensor) -> Tensor:
        embedded = self.enorm.forward(self._embed(input_ids))
        return self.eh_proj.forward(torch.cat([embedded, self.hnorm.forward(previous)], dim=-1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [N, V], of hidden states [N, hidden]."""
        return self._logits(hidden)

    @property
    def slices(self) -> VocabularySlices | None:
        """The division of the vocabulary among ranks; None: every rank computes all logits."""
        return self.head.slices

    def sliced_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's slice, float32 [N, size], of hidden [N, hidden]."""
        return self.head.sliced_logits(hidden)

    @property
    def head(self) -> LmHead:
        """The head of ``logits``; drafts may use one of fewer tokens in its place."""
        # not an attribute, because the target's head is not a part of this layer
        head: LmHead = self._logits.__self__  # type: ignore[attr-defined]
        return head

    def ignored(self, name: str) -> bool:
        """Return whether checkpoint tensor ``name`` is not loaded into this layer.

        Such tensors are those of the target, rotary frequencies, and experts of other ranks.
        """
        return (
            not name.startswith(f"{self.prefix}.")
            or name.endswith("rotary_emb.inv_freq")
            or name.rpartition(".")[0] in self._elsewhere
        )
