"""Tokens that a grammar forces, offered as the drafts of the next step.

Where a grammar leaves a single continuation, the next tokens are known before the model has seen
them. The host finds them while it fills the masks of a step, behind each token that the step may
end with: it does not know yet which drafts are accepted. The device does when the next step drafts,
and replaces the drafts by the forced tokens. Acceptance is unchanged: a draft is accepted if it
equals the token that is drawn under its mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, where

from glowplug.core.step.to_device import send

NONE = -1  #: no token is forced


class ForcedDrafts:
    """The forced tokens behind the rows of the last step.

    In each step call ``offer`` after its drafts, ``add`` while masks are filled, and ``keep`` when
    the step is launched.

    Args:
        most: most drafts of a row.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._added: dict[int, dict[int, list[int]]] = {}
        self._kept: dict[int, tuple[int, dict[int, list[int]]]] = {}
        self._counts: Tensor | None = None

    def add(self, i: int, node: int, forced: Seq[int]) -> None:
        """Add tokens that must follow in row ``i`` of the batch.

        Args:
            i: row of the batch.
            node: the token of the row's chain that they follow.
            forced: the tokens; the step itself draws the first one.
        """
        if len(forced) > 1:
            self._added.setdefault(i, {})[node] = list(forced[1 : 1 + self.most])

    def keep(self, rows: Seq[int], counts: Tensor) -> list[int]:
        """Keep what was added for the next step, and return the rows of the batch that have any.

        Args:
            rows: rows of the sequence table, by row of the batch.
            counts: tokens that each row of the batch gains, int32 [B], on the device.
        """
        self._kept = {rows[i]: (i, behind) for i, behind in self._added.items()}
        self._counts = counts.clone() if self._kept else None
        added = list(self._added)
        self._added = {}
        return added

    def drop(self, rows: Iterable[int]) -> None:
        """Drop the tokens of rows of the sequence table, whose sequences have changed."""
        for row in rows:
            self._kept.pop(row, None)

    def offer(self, drafted: Tensor, rows: Seq[int], given: Tensor | None = None) -> None:
        """Replace drafts by forced tokens, in place and without waiting.

        Args:
            drafted: newest tokens and drafts, int64 [D, W]; a row's drafts form a chain.
            rows: rows of the sequence table, of the decoding rows.
            given: number of drafts of each row, int32 [D], which is updated; None: all have W - 1.
        """
        found = [at for at, row in enumerate(rows) if row in self._kept]
        kept = [self._kept[rows[at]] for at in found]
        self._kept = {}
        width = drafted.shape[1]
        if not found or self._counts is None or width == 1:
            return
        table = _table([behind for _, behind in kept], width - 1)
        before = [place for place, _ in kept]
        indices = [np.array(part, np.int64) for part in (found, before, range(len(found)))]
        places, sources, ids, flat = send([*indices, table.ravel()], drafted.device)
        forced = _behind(flat.view(table.shape), ids, self._counts[sources].long() - 1)
        _replace(drafted, given, places, forced)


def _table(behind: Seq[dict[int, list[int]]], most: int) -> NDArray[np.int64]:
    """Return the forced tokens behind each node, [rows, nodes, most]."""
    nodes = 1 + max(max(tokens) for tokens in behind)
    table = np.full((len(behind), nodes, most), NONE, np.int64)
    for row, tokens in zip(table, behind):
        for node, forced in tokens.items():
            row[node, : len(forced)] = forced[:most]
    return table


def _replace(drafted: Tensor, given: Tensor | None, places: Tensor, forced: Tensor) -> None:
    """Replace the drafts of the rows ``places`` [n] by ``forced``, [n, W - 1], unless ``NONE``."""
    if given is not None:
        given[places] = given[places].maximum((forced != NONE).sum(1, dtype=given.dtype))
    chains = drafted[places]
    chains[:, 1:] = where(forced == NONE, chains[:, 1:], forced)
    drafted[places] = chains


def _behind(table: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
    """Return the tokens behind node ``ends`` of each row ``ids``; ``NONE`` outside ``table``."""
    nodes = table.shape[1]
    forced = table[ids, ends.clamp(max=nodes - 1)]
    return where((ends < nodes)[:, None], forced, NONE)
