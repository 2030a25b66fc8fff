"""A stand-in for the exchange of tokens through peers' memory, over collectives of threads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.core.facts.mesh import axis_size
from glowplug.kernels.launch.sums import add_up

ABSENT = float("nan")  #: contents of rows that are not sent


class ThreadRows:
    """The ``ExpertRows`` of one rank, by all-gather and all-to-all.

    Values that the real exchange does not send are NaN.
    """

    formats: frozenset[str] = frozenset()

    def __init__(self, collectives: Any, rank: int, ranks: int, rows: int) -> None:
        self.rows = rows
        self._collectives = collectives
        self._rank = rank
        self._ranks = ranks

    @staticmethod
    def _local(ids: Tensor, share: int, held: int) -> Tensor:
        local = ids - share * held
        return torch.where((local >= 0) & (local < held), local, -1)

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, rows: int, held: int, within: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert len(x) <= rows <= self.rows
        fill = (0, 0, 0, rows - len(x))
        x, weights = F.pad(x, fill, value=ABSENT), F.pad(weights, fill)
        given = F.pad(ids, fill, value=-1)
        every, ids, weights = (
            self._collectives.all_gather(one.contiguous(), "tp") for one in (x, given, weights)
        )
        local = self._local(ids, self._rank // within, held)
        absent = (local < 0).all(-1, keepdim=True)
        return every.masked_fill(absent, ABSENT), local.int(), weights

    def combine(
        self,
        y: Tensor,
        local: Tensor,
        ids: Tensor,
        held: int,
        within: int,
        beside: Tensor | None = None,
        exact: bool = False,
    ) -> Tensor:
        tokens = len(ids)
        sent = y.masked_fill((local < 0).all(-1, keepdim=True), ABSENT)
        parts = self._collectives.all_to_all(sent.view(self._ranks, -1, y.shape[1]), "tp")
        shares = [self._local(ids, rank // within, held) for rank in range(self._ranks)]
        used = torch.stack([(share >= 0).any(-1) for share in shares])
        parts = parts[:, :tokens].float().masked_fill(~used.unsqueeze(-1), 0.0)
        total = add_up(parts) if beside is None else add_up(parts) + beside
        total = F.pad(total, (0, 0, 0, len(y) // self._ranks - tokens))
        return total if exact else total.to(y.dtype)


class Pushing:
    """The collectives of one rank, with ``expert_rows``.

    Args:
        rows: most rows of a rank that are pushed; larger steps use all-gather.
    """

    def __init__(self, collectives: Any, rank: int, mesh: dict[str, int], rows: int = 7) -> None:
        self._collectives = collectives
        self._rank = rank
        self._mesh = mesh
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def expert_rows(
        self, axis: str, hidden: int, topk: int, rows: int, dtype: str
    ) -> ThreadRows | None:
        assert axis == "tp" and rows > 0
        ranks = axis_size(axis, self._mesh)
        return ThreadRows(self._collectives, self._rank, ranks, self._rows)
