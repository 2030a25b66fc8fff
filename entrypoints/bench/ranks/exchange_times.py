"""Times of the exchanges between ranks in a decode step, from measurements, for floors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.model_facts import ModelFacts

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
EXCHANGE = "expert exchange"  #: dispatch and combine


@dataclass(frozen=True)
class CountedExchange:
    """An exchange that every decode step makes.

    Attributes:
        operation: name of the operation.
        ranks: number of ranks that take part.
        size: bytes of the whole tensor; for the expert exchange tokens of each rank.
        count: number of times that a step makes it.
    """

    operation: str
    ranks: int
    size: int
    count: int


def step_exchanges(
    model: ModelFacts, mesh: Mapping[str, int], batch: int, element: int = 2
) -> Iterator[CountedExchange]:
    """Yield the exchanges that a decode step of ``batch`` sequences needs at least.

    Without groups, each layer sums its attention and its feed-forward results over all ranks. With
    groups (data-parallel attention), tokens go to their experts and back if ranks divide the
    experts, and are gathered and scattered otherwise. The embedding and the logits are left out.

    Args:
        model: the model.
        mesh: mesh axis -> size.
        batch: number of sequences.
        element: bytes of an activation.
    """
    groups = mesh.get("dp", 1)
    within = axis_size("attn_tp", mesh)
    layers = model.num_layers
    rows = -(-batch // groups)
    token = model.hidden_size * element
    if mesh.get("tp", 1) == 1:
        return
    if groups == 1:
        yield CountedExchange(ALL_REDUCE, mesh["tp"], batch * token, 2 * layers)
        return
    if within > 1:
        yield CountedExchange(ALL_REDUCE, within, rows * token, layers)
    exchanged = sum(model.sizes.routed[:layers]) if mesh.get("ep", 1) > 1 else 0
    if exchanged:
        yield CountedExchange(EXCHANGE, mesh["tp"], -(-rows // within), exchanged)
    if exchanged < layers:
        for operation in (ALL_GATHER, REDUCE_SCATTER):
            yield CountedExchange(operation, groups, groups * rows * token, layers - exchanged)


class ExchangeTimes:
    """Measured times of exchanges, the fastest provider of each.

    Args:
        rows: rows of a record of ``bench kernels --collectives``.
        source: where they come from, for records.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], source: str) -> None:
        self.source = source
        self._seconds: dict[tuple[str, int], dict[int, float]] = {}
        for row in rows:
            exchanged = row["operation"].startswith(EXCHANGE)  # in any format of the tokens
            operation = EXCHANGE if exchanged else row["operation"]
            points = self._seconds.setdefault((operation, row["ranks"]), {})
            size = row["tokens" if exchanged else "bytes"]
            points[size] = min(points.get(size, float("inf")), row["us"] / 1e6)

    @classmethod
    def read(cls, path: Path) -> ExchangeTimes:
        """Read a record that ``bench kernels --collectives --output-file`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such record.
        """
        try:
            record = orjson.loads(path.read_bytes())
            return cls(record["rows"], f"{path.name} ({record['date']}, {record['card']})")
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ValueError(
                f"{path} is no record of `bench kernels --collectives --output-file`"
            ) from None

    def seconds(self, exchange: CountedExchange) -> float:
        """Return the seconds of one such exchange.

        Sizes between two measured ones are interpolated; those beyond the largest one take
        proportionally longer, those below the smallest as long as this one.

        Raises:
            ValueError: the operation was not measured with this number of ranks.
        """
        points = self._seconds.get((exchange.operation, exchange.ranks))
        if not points:
            raise ValueError(
                f"{self.source} has no {exchange.operation} of {exchange.ranks} ranks: measure it "
                f"with `glowplug bench kernels --collectives --tp {exchange.ranks}`"
            )
        size = exchange.size
        below = max((one for one in points if one <= size), default=None)
        above = min((one for one in points if one >= size), default=None)
        if below is None or above is None:
            nearest = min(points) if below is None else max(points)
            return points[nearest] * max(1.0, size / nearest)
        if below == above:
            return points[below]
        share = (size - below) / (above - below)
        return points[below] + share * (points[above] - points[below])

    def step(self, model: ModelFacts, mesh: Mapping[str, int], batch: int) -> float:
        """Return the seconds of all exchanges of a decode step; see ``step_exchanges``.

        Raises:
            ValueError: an operation was not measured.
        """
        return sum(
            exchange.count * self.seconds(exchange)
            for exchange in step_exchanges(model, mesh, batch)
        )
