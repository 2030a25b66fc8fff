"""EAGLE heads: draft models of one decoder layer that continue the target's hidden states.

At position i a head reads the target's state of token i and the embedding of token i + 1, and
predicts token i + 2. Later passes of a round read the head's own output in place of the target's
state. Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from glowplug.core.layers.attention import MlaAttention
from glowplug.core.layers.decoder import DecoderLayer, DecoderModel
from glowplug.core.layers.embedding import Embedding, LmHead
from glowplug.core.layers.linear import Linear, Part
from glowplug.core.layers.mha import MhaAttention
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.module import Module, Target
from glowplug.core.layers.norm import RmsNorm
from glowplug.core.layers.rope import Rope
from glowplug.core.protocols import VocabularySlices, WeightTarget
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import PREVIOUS_HIDDEN, Batch
from glowplug.models.eagle.config import OFFSETS, TARGET_MASK, EagleConfig

#: function of (context, name, size of the attention's input) -> the head's attention
AttentionOf = Callable[[BuildContext, str, int], MlaAttention | MhaAttention]


class EagleHead(Module):
    """A head as a ``protocols.Model``; its KV-pool layer is ``context.first_layer``.

    Attributes:
        target_ids: target's id of each draft id, int64 [draft vocabulary]; None if they are equal.
    """

    target_ids: Tensor | None = None
    _logits: Callable[[Tensor], Tensor]  #: the forward pass of ``head``

    def __init__(
        self, context: BuildContext, config: EagleConfig, target: DecoderModel, rope: Rope
    ) -> None:
        facts = context.facts
        self.config = config
        self.own_embed = (
            Embedding(context, f"{config.root}embed_tokens", facts.vocab_size, facts.hidden_size)
            if config.own_embedding
            else None
        )
        self._embed = (self.own_embed or target.embed).forward
        self.rope = rope

    def states(self, hidden: Tensor) -> Tensor:
        """Return the states [T, hidden] that the head continues, from the target's results [T, N].

        These are the target's final hidden states unless the head reads features.
        """
        return hidden

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run the head on one batch.

        Args:
            input_ids: int64 [T], the token that follows each state.
            positions: int64 [T].
            batch: ``batch.extra[PREVIOUS_HIDDEN]`` has the states [T, hidden].

        Returns:
            Output [T, hidden], the input of ``logits`` and the states of a further pass.
        """

    @abstractmethod
    def fill(
        self, input_ids: Tensor, positions: Tensor, kv_slots: Tensor, previous: Tensor
    ) -> None:
        """Write the KV cache for tokens from which nothing is drafted.

        Args:
            input_ids: int64 [T], as in ``forward``.
            positions: int64 [T].
            kv_slots: int64 [T], KV slots.
            previous: [T, hidden], as ``batch.extra[PREVIOUS_HIDDEN]`` in ``forward``.
        """

    def head_input(self, hidden: Tensor) -> Tensor:
        """Return what ``head`` reads of outputs, [N, hidden]."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits over the draft vocabulary, float32 [N, V], of outputs [N, hidden]."""
        return self.head.forward(self.head_input(hidden))

    @property
    def head(self) -> LmHead:
        """The head of ``logits``; drafts may use one of fewer tokens in its place."""
        # not an attribute, because the target's head is not a part of this module
        head: LmHead = self._logits.__self__  # type: ignore[attr-defined]
        return head

    @property
    def slices(self) -> VocabularySlices | None:
        """The division of the vocabulary among ranks; None: every rank computes all logits."""
        return self.head.slices

    def sliced_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's slice, float32 [N, size], of outputs [N, hidden]."""
        return self.head.sliced_logits(self.head_input(hidden))

    def ignored(self, name: str) -> bool:
        """Return whether checkpoint tensor ``name`` is not loaded into the head."""
        return (
            name == TARGET_MASK
            or name.endswith("rotary_emb.inv_freq")
            or (name == "lm_head.weight" and not self.config.own_head)
        )


class Eagle1Head(EagleHead):
    """An EAGLE-1 or EAGLE-2 head: ``fc`` joins embedding and state, one layer without input norm.

    Its output estimates the target's final hidden state, from which the target's head computes the
    logits.
    """

    def __init__(
        self,
        context: BuildContext,
        config: EagleConfig,
        target: DecoderModel,
        rope: Rope,
        attention: AttentionOf,
    ) -> None:
        super().__init__(context, config, target, rope)
        hidden = context.facts.hidden_size
        self.fc = _fc(context, config, 2 * hidden)
        self.layer = _layer(context, config, attention, hidden, sums_in_norm=False)
        self._logits = target.head.forward

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        x = self._joined(input_ids, batch.extra[PREVIOUS_HIDDEN])
        out, residual = self.layer.forward_normed(x, x, self.rope.at(positions), batch)
        assert isinstance(out, Tensor), "the layer is built without sums in the next norm"
        return residual + out

    def fill(
        self, input_ids: Tensor, positions: Tensor, kv_slots: Tensor, previous: Tensor
    ) -> None:
        x = self._joined(input_ids, previous)
        self.layer.attention.fill(x, self.rope.at(positions), kv_slots)

    def _joined(self, input_ids: Tensor, previous: Tensor) -> Tensor:
        return self.fc.forward(torch.cat([self._embed(input_ids), previous], dim=-1))


class Eagle3Head(EagleHead):
    """An EAGLE-3 head: its attention reads the normed embedding beside the normed state.

    ``fc`` reduces the target's features to states. The output is that of the layer, before the
    final norm. The draft vocabulary may be a part of the target's.
    """

    def __init__(
        self,
        context: BuildContext,
        config: EagleConfig,
        target: DecoderModel,
        rope: Rope,
        attention: AttentionOf,
    ) -> None:
        super().__init__(context, config, target, rope)
        facts = context.facts
        hidden = facts.hidden_size
        features = config.features_of(target.num_layers)
        self._hidden = hidden
        self.feature_norms = [
            _norm(context, f"{config.root}fc_norm.{number}")
            for number in range(len(features) if config.norms_features else 0)
        ]
        self.fc = _fc(context, config, len(features) * hidden) if features else None
        if features:
            target.keep_features(features)
        self.input_norm = _norm(context, f"{config.layer}.input_layernorm")
        self.hidden_norm = _norm(context, f"{config.layer}.hidden_norm")
        self.layer = _layer(context, config, attention, 2 * hidden)
        self.norm = _norm(context, f"{config.root}norm")
        self.own_head = (
            LmHead(context, "lm_head", config.draft_vocab, hidden) if config.own_head else None
        )
        self._logits = (self.own_head or target.head).forward
        if config.draft_vocab != facts.vocab_size or OFFSETS in facts.tensors:
            self.target_ids = torch.zeros(
                config.draft_vocab, dtype=torch.int64, device=context.worker.device
            )
            self._offsets_dtype = facts.tensors[OFFSETS].dtype if OFFSETS in facts.tensors else None

    def own_targets(self) -> Iterator[WeightTarget]:
        """Yield the target of the draft vocabulary's offsets."""
        if self.target_ids is not None:
            ids = self.target_ids
            yield Target(OFFSETS, tuple(ids.shape), ids, optional=True, dtype=self._offsets_dtype)

    def finalize(self) -> None:
        """Finalize the children, and turn the loaded offsets into ids."""
        super().finalize()
        if self.target_ids is not None:
            self.target_ids += torch.arange(len(self.target_ids), device=self.target_ids.device)

    def states(self, hidden: Tensor) -> Tensor:
        if self.fc is None:
            return hidden
        features = hidden[:, self._hidden :]
        if self.feature_norms:
            parts = features.split(self._hidden, dim=-1)
            normed = (norm.forward(part) for norm, part in zip(self.feature_norms, parts))
            return self.fc.forward(torch.cat(list(normed), dim=-1))
        return self.fc.forward(features.contiguous())

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        previous = batch.extra[PREVIOUS_HIDDEN]
        normed = self.hidden_norm.forward(previous)
        residual = normed if self.config.normed_residual else previous
        x = torch.cat([self.input_norm.forward(self._embed(input_ids)), normed], dim=-1)
        out, residual = self.layer.forward_normed(x, residual, self.rope.at(positions), batch)
        both = self.norm.add(out, residual)
        output: Tensor = both[0] if self.config.normed_output else both[1]
        return output

    def fill(
        self, input_ids: Tensor, positions: Tensor, kv_slots: Tensor, previous: Tensor
    ) -> None:
        embedded = self.input_norm.forward(self._embed(input_ids))
        x = torch.cat([embedded, self.hidden_norm.forward(previous)], dim=-1)
        self.layer.attention.fill(x, self.rope.at(positions), kv_slots)

    def head_input(self, hidden: Tensor) -> Tensor:
        return hidden if self.config.normed_output else self.norm.forward(hidden)


class HeadLayer(DecoderLayer):
    """A decoder layer whose input the head norms, or leaves unnormed."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden: int,
        eps: float,
        attention: MlaAttention | MhaAttention,
        feed_forward: Mlp,
    ) -> None:
        super().__init__(context, name, hidden, eps, attention, feed_forward)
        del self.input_norm


def build_head(
    context: BuildContext, target: DecoderModel, rope: Rope, attention: AttentionOf
) -> EagleHead:
    """Build the head of ``context.facts`` for ``target``.

    Heads are published unquantised, so quantization schemes of the target do not apply.

    Args:
        context: the draft's build context.
        target: the target.
        rope: rotary embedding of the head.
        attention: builder of the head's attention.
    """
    context = replace(context, scheme=context.plain)
    config = EagleConfig.read(context.facts)
    if config.version == 3:
        return Eagle3Head(context, config, target, rope, attention)
    return Eagle1Head(context, config, target, rope, attention)


def _layer(
    context: BuildContext,
    config: EagleConfig,
    attention: AttentionOf,
    inputs: int,
    sums_in_norm: bool = True,
) -> HeadLayer:
    facts = context.facts
    feed_forward = Mlp(
        context,
        f"{config.layer}.mlp",
        facts.hidden_size,
        facts.config["intermediate_size"],
        bias=bool(facts.config.get("mlp_bias")),
        sums_in_norm=sums_in_norm,
    )
    return HeadLayer(
        context,
        config.layer,
        facts.hidden_size,
        facts.config.get("rms_norm_eps", 1e-6),
        attention(context, f"{config.layer}.self_attn", inputs),
        feed_forward,
    )


def _fc(context: BuildContext, config: EagleConfig, inputs: int) -> Linear:
    name = f"{config.root}fc"
    part = Part(name, context.facts.hidden_size, "replicated", bias=config.fc_bias)
    return Linear(context, name, inputs, [part])


def _norm(context: BuildContext, name: str) -> RmsNorm:
    facts = context.facts
    return RmsNorm(context, name, facts.hidden_size, facts.config.get("rms_norm_eps", 1e-6))
