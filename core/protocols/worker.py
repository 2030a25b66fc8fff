"""Arguments of factories and of ``reserve``: the rank, and upper bounds of its sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.protocols.parallel import Collectives


@dataclass(frozen=True)
class Worker:
    """The rank that a factory builds for.

    Attributes:
        rank: number of the rank, from 0.
        ranks: number of ranks.
        device: torch device string.
        dtype: torch dtype of activations.
        coordinates: mesh axis -> this rank's index.
        clock: time in seconds; in the loop the same on every rank (``RankClock``).
        rendezvous: address at which ranks meet (``init_method`` of torch.distributed); "" for one
            rank.
        collectives: collectives of the parallelism strategies; None for all other components.
    """

    rank: int = 0
    ranks: int = 1
    device: str = "cpu"
    dtype: Any = None
    coordinates: Mapping[str, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    rendezvous: str = ""
    collectives: Collectives | None = None


@dataclass(frozen=True)
class Limits:
    """Upper bounds of a rank's sizes, for ``reserve``.

    Attributes:
        rows: number of rows of the sequence table, plus one that padding rows of a captured step
            use.
        context: number of positions that a row may touch: the longest sequence, a step at its end,
            and drafts.
        num_pages: number of pages of the KV pool, the scratch page 0 included.
        width: number of tokens that a decoding row computes in a step.
        vocab: size of the vocabulary.
        kv: the KV pool: for each layer a mapping from entry name to a tensor [pages * page_size,
            *shape].
        hidden: size of the target's hidden states.
    """

    rows: int
    context: int
    num_pages: int
    width: int
    vocab: int
    kv: tuple[Mapping[str, Tensor], ...] = ()
    hidden: int = 0
