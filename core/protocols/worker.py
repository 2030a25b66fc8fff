"""What a factory and ``reserve`` receive: the rank, and upper bounds."""

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
    """The rank a factory builds for. ``device``: torch device string; ``dtype``: torch dtype of
    activations.
    """

    rank: int = 0
    ranks: int = 1
    device: str = "cpu"
    dtype: Any = None
    coordinates: Mapping[str, int] = field(default_factory=dict)  #: mesh axis -> this rank's index
    clock: Callable[[], float] = (
        time.monotonic
    )  #: seconds; in the loop the same on every rank (``RankClock``)
    rendezvous: str = (
        ""  #: where ranks meet (``init_method`` of torch.distributed); "" for one rank
    )
    collectives: Collectives | None = (
        None  #: what parallel strategies exchange through; they are given it, others not
    )


@dataclass(frozen=True)
class Limits:
    """Upper bounds for ``reserve``. ``kv``: one mapping entry name -> tensor [pages * page_size,
    *shape] a layer.

    ``rows``: those of the sequence table and one behind them that no sequence has: rows added to a
    captured step to
    fill it up work on it. ``hidden``: size of the target's hidden states.
    """

    rows: int
    context: int
    num_pages: int
    width: int
    vocab: int
    kv: tuple[Mapping[str, Tensor], ...] = ()
    hidden: int = 0
