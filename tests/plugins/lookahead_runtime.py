"""The runtime of the speculative algorithm "lookahead"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glowplug.core.api import DraftShape, EnginePlan
from glowplug.core.layers.decoder import DecoderLayer
from glowplug.core.layers.linear import Linear, Part
from glowplug.core.layers.mha import MhaAttention
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.module import Module
from glowplug.core.layers.norm import RmsNorm
from glowplug.core.layers.rope import Rope, RopeConfig
from glowplug.core.protocols import (
    BuildContext,
    KeepsFeatures,
    Limits,
    Model,
    ModelFamily,
    Sampler,
    Worker,
)
from glowplug.core.speculation.token_drafts import TokenDrafts
from glowplug.core.step.batch import Accepted, Batch
from tests.plugins.lookahead import FEATURES, LookaheadOptions

EPS = 1e-6


class Layers(Module):
    """``fc``, decoder layers and a norm; the head is the target's."""

    def __init__(self, context: BuildContext, target: Model) -> None:
        facts = context.facts
        hidden = facts.hidden_size
        inputs = (1 + len(FEATURES)) * hidden
        self.fc = Linear(context, "fc", inputs, [Part("fc", hidden, "replicated")])
        self.layers = [layer(context, number) for number in range(facts.num_layers)]
        self.norm = RmsNorm(context, "norm", hidden, EPS)
        config = RopeConfig.read(facts.config)
        self.rope = Rope(context, config, facts.head_dim, interleaved=False)
        self.logits = target.logits

    def forward(self, states: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Return normed hidden states [T, hidden] after the target's states, [T, 3 * hidden]."""
        at = self.rope.at(positions)
        x: Any = self.fc.forward(states)
        residual = None
        for one in self.layers:
            x, residual = one.forward(x, residual, at, batch)
        normed: Tensor = self.norm.add(x, residual)[0]
        return normed

    def ignored(self, name: str) -> bool:
        return False


def layer(context: BuildContext, number: int) -> DecoderLayer:
    """Build a layer, whose keys and values are in the KV pool behind the target's."""
    facts = context.facts
    name = f"model.layers.{number}"
    attention = MhaAttention(
        context,
        f"{name}.self_attn",
        context.first_layer + number,
        hidden=facts.hidden_size,
        heads=facts.num_heads,
        kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        scale=facts.head_dim**-0.5,
    )
    mlp = Mlp(context, f"{name}.mlp", facts.hidden_size, facts.config["intermediate_size"])
    return DecoderLayer(context, name, facts.hidden_size, EPS, attention, mlp)


class Lookahead(TokenDrafts):
    """Drafts of one token, predicted when the step before computed the last accepted token."""

    def __init__(self, options: LookaheadOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(plan, worker)

    def draft_model(self, context: BuildContext, family: ModelFamily, target: Model) -> Any:
        assert isinstance(target, KeepsFeatures)
        target.keep_features(FEATURES)
        self._model = Layers(context, target)
        return self._model

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        self._drafts = torch.zeros(limits.rows, dtype=torch.int64, device=self._device)

    def propose(self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape) -> Tensor:
        return self._drafts[rows, None]

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        accepted = super().accept(logits, hidden, batch, sampler)
        states = self._model.forward(hidden, batch.positions, batch)
        # a row's last accepted token; the last of a chunk, whose row has no draft to use yet
        decodes = batch.num_decodes
        last = batch.query_starts[1:].long() - 1
        width = batch.decode_tokens // max(1, decodes)
        last[:decodes] += accepted.counts[:decodes].long() - width
        self._drafts[batch.row_ids] = self._model.logits(states[last]).argmax(-1)
        return accepted


def no_model(options: Any, plan: EnginePlan, worker: Worker) -> Any:
    raise NotImplementedError("the folders hold layers of a draft, not models")
