"""Rotary position embedding (RoPE): one object per model, with the table and each step's rows."""

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
    """The RoPE settings of a model.

    Attributes:
        theta: base of the frequencies.
        scaling: config.json's ``rope_scaling``; None for plain RoPE.
        max_positions: config.json's ``max_position_embeddings``.
    """

    theta: float
    scaling: Mapping[str, Any] | None
    max_positions: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read the settings from config.json.

        Both spellings are read: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``.
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
        """Return the softmax scale head_dim^-1/2, with YaRN's factor.

        If the config has ``mscale_all_dim``, the scale is multiplied by YaRN's mscale squared.
        """
        scaling = self.scaling or {}
        all_dim = scaling.get("mscale_all_dim") or 0.0
        factor = scaling.get("factor") or 1.0
        mscale = 0.1 * all_dim * math.log(factor) + 1.0 if all_dim and factor > 1 else 1.0
        return float(head_dim**-0.5 * mscale * mscale)


class Rope:
    """Rotation of ``dim`` elements for all positions of the context.

    Attributes:
        interleaved: True: pairs of adjacent elements are rotated; False: element i and i + dim / 2.
        table: float32 [positions, dim], cosines then sines. Positions beyond the context, which
            only dropped tokens use, repeat the last row.
    """

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
        """Return the table's rows for positions int64 [T], as ``ops.rope`` takes them.

        This is called once a step.
        """
        return self._at(self.table, positions, self.interleaved)
