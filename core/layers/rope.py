"""Rotary position embedding as one object a model: the table, and each step's rows of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glowplug.core.protocols.build_context import BuildContext


@dataclass(frozen=True)
class RopeConfig:
    """``scaling`` is config.json's ``rope_scaling``, None when plain."""

    theta: float
    scaling: Mapping[str, Any] | None
    max_positions: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From config.json in either spelling: ``rope_theta`` with ``rope_scaling``, or
        ``rope_parameters``.
        """
        parameters = dict(config.get("rope_parameters") or {})
        scaling = config.get("rope_scaling") or parameters or None
        theta = config.get("rope_theta") or parameters.get("rope_theta") or 10000.0
        kind = str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")
        return cls(
            float(theta),
            None if kind == "default" else scaling,
            int(config.get("max_position_embeddings", 2048)),
        )

    def softmax_scale(self, head_dim: int) -> float:
        """head_dim^-1/2, times YaRN's mscale squared where the config has ``mscale_all_dim``
        (DeepSeek).
        """
        scaling = self.scaling or {}
        all_dim = scaling.get("mscale_all_dim") or 0.0
        factor = scaling.get("factor") or 1.0
        mscale = 0.1 * all_dim * math.log(factor) + 1.0 if all_dim and factor > 1 else 1.0
        return float(head_dim**-0.5 * mscale * mscale)


class Rope:
    """Rotation of ``dim`` elements for positions of the whole context."""

    def __init__(
        self, context: BuildContext, config: RopeConfig, dim: int, interleaved: bool
    ) -> None:
        self.interleaved = interleaved
        table = context.ops.rope_table(
            dim, context.context, config.theta, config.scaling, config.max_positions
        )
        self.table = torch.cat([table, table[-1:].expand(context.spare, -1)])
        self._at = context.ops.rope_at

    def at(self, positions: Tensor) -> object:
        """What the layers hand to ``ops.rope`` in this step; positions int64 [T]."""
        return self._at(self.table, positions, self.interleaved)
