"""Conformance suites of the ``attention`` slot: subclass MlaSuite or MhaSuite and define ``make``.

Attention over random paged layouts is compared with its definition in float64. KV slots that
no row of the step owns hold NaN, so that reading one makes a test fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.layers.rope import RopeConfig
from glowplug.core.protocols import AttentionBackend
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.parts.attention_base import MhaCase as MhaCase, MlaCase as MlaCase
from glowplug.core.testing.suites.parts.attention_plans import PlanSuite


class MlaSuite(PlanSuite):
    """Tests of backends that offer kind "mla". The sizes may be overridden.

    ``merged``: the cache has one entry "kv": a token's latent, then its rotary part.
    """

    heads = 3
    nope = 8
    rope = 4
    value = 6
    lora = 16
    merged = False

    @property
    def entries(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return (
            {"kv": (self.lora + self.rope,)}
            if self.merged
            else {"latent": (self.lora,), "rope": (self.rope,)}
        )

    @property
    def queries(self) -> tuple[tuple[int, ...], ...]:  # type: ignore[override]
        return (self.heads, self.nope), (self.heads, self.rope)

    def facts(self) -> ModelFacts:
        config = {
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale_all_dim": 0.4},
        }
        return replace(
            bare_plan().facts.model,
            kind="mla",
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.nope + self.rope,
            kv_lora_rank=self.lora,
            qk_rope_head_dim=self.rope,
            num_layers=2,
            config=config,
        )

    def layer(self, generator: torch.Generator) -> MlaCase:
        spread = self.lora**-0.5
        w_uk = torch.randn(self.heads, self.nope, self.lora, generator=generator) * spread
        w_uv = torch.randn(self.heads, self.lora, self.value, generator=generator) * spread
        return self._case(self.rounded(w_uk), self.rounded(w_uv))

    def _case(self, w_uk: Tensor, w_uv: Tensor) -> MlaCase:
        scale = RopeConfig.read(self.facts().config).softmax_scale(self.nope + self.rope)
        return MlaCase(
            w_uk,
            w_uv,
            heads=self.heads,
            nope_dim=self.nope,
            rope_dim=self.rope,
            v_dim=self.value,
            lora_rank=self.lora,
            scale=scale,
        )

    def attend(self, backend: AttentionBackend, layer: MlaCase | MhaCase) -> Callable[..., Tensor]:
        assert isinstance(layer, MlaCase)
        there = self._case(
            layer.w_uk.to(self.device, self.dtype), layer.w_uv.to(self.device, self.dtype)
        )
        there = replace(there, index=layer.index)
        return lambda q_nope, q_rope, *kept: backend.mla(q_nope, q_rope, *self._entry(kept), there)

    def _entry(self, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the latent and the rotary part of entries."""
        whole = torch.cat(list(kept), dim=-1)
        return whole[:, : self.lora], whole[:, self.lora :]

    def definition(
        self, queries: list[Tensor], history: list[Tensor], layer: MlaCase | MhaCase
    ) -> Tensor:
        assert isinstance(layer, MlaCase)
        (q_nope, q_rope) = queries
        (latent, rope) = self._entry(history)
        k_nope, value = self._case(layer.w_uk.double(), layer.w_uv.double()).expand(latent.double())
        scores = torch.einsum("thn,mhn->htm", q_nope.double(), k_nope)
        scores = scores + torch.einsum("thp,mp->htm", q_rope.double(), rope.double())
        return torch.einsum("htm,mhv->thv", causal_softmax(scores * layer.scale), value)


class MhaSuite(PlanSuite):
    """Tests of backends that offer kind "mha": MHA, GQA or MQA by ``heads`` and ``kv_heads``."""

    heads = 6
    kv_heads = 2
    queries = ((6, 8),)
    entries = {"k": (2, 8), "v": (2, 8)}

    def facts(self) -> ModelFacts:
        return replace(
            bare_plan().facts.model,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=8,
            num_layers=2,
        )

    def layer(self, generator: torch.Generator) -> MhaCase:
        return MhaCase(self.heads, self.kv_heads)

    def attend(self, backend: AttentionBackend, layer: MlaCase | MhaCase) -> Callable[..., Tensor]:
        assert isinstance(layer, MhaCase)
        return lambda q, k, v: backend.mha(q, k, v, layer)

    def definition(
        self, queries: list[Tensor], history: list[Tensor], layer: MlaCase | MhaCase
    ) -> Tensor:
        assert isinstance(layer, MhaCase)
        key, value = (
            x.double().repeat_interleave(layer.heads // layer.kv_heads, dim=1) for x in history
        )
        scores = torch.einsum("thd,mhd->htm", queries[0].double(), key)
        return torch.einsum("htm,mhv->thv", causal_softmax(scores * layer.scale), value)


def causal_softmax(scores: Tensor) -> Tensor:
    """Return the causal softmax of scores [H, T, M].

    The last query attends to all M keys, the one before it to M - 1, and so on.
    """

    count, keys = scores.shape[1:]
    last_seen = torch.arange(count, device=scores.device) + (keys - count)
    hidden = torch.arange(keys, device=scores.device) > last_seen.unsqueeze(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
