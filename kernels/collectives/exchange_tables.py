"""Tables of the measured times of exchanges between ranks, from which thresholds are chosen.

There is one file for each card, number of ranks and dtype. It is an object with the parts

- ``measured``: card, ranks, dtype, hidden size and conditions of the measurement,
- ``all_reduce``: {bytes of the tensor: {way: microseconds}},
- ``expert exchange``: {tokens of a rank: {exchange: microseconds}}.

A way is named as ``glowplug bench kernels --collectives`` names it. That command writes the files.
They are found as other tuned tables are (:mod:`glowplug.kernels.launch.tuned_tables`). No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from glowplug.kernels.launch import measured_tables, tuned_tables
from glowplug.kernels.launch.measured_tables import MEASURED, Found, Rows
from glowplug.kernels.launch.tuned_tables import NoTable

ALL_REDUCE = "all_reduce"
EXCHANGE = "expert exchange"
#: a time below this share of that of a smaller size is no noise, but a wrong measurement
LEAST_SHARE = 0.6

Times = Rows  #: size -> way -> microseconds


@dataclass(frozen=True)
class ExchangeTable:
    """Measured times of the exchanges between a number of ranks.

    Attributes:
        hidden: hidden size of the tokens of ``exchange``.
        all_reduce: times by bytes of the tensor, in ascending order.
        exchange: times by tokens of each rank, in ascending order.
    """

    hidden: int = 0
    all_reduce: Times = field(default_factory=dict)
    exchange: Times = field(default_factory=dict)


FoundTable = Found[ExchangeTable]


def file_name(card: str, ranks: int, dtype: str) -> str:
    """Return the file name of the table. ``card``: name of the GPU."""
    return f"exchanges,device_name={tuned_tables.spelt(card)},ranks={ranks},dtype={dtype}.json"


@cache
def exchange_table(card: str, ranks: int, dtype: str) -> FoundTable:
    """Return the table for this card, number of ranks and dtype, from the first folder that has it.

    A file that is no such table is passed over, and the reason says so.
    """
    return measured_tables.first_fitting(
        file_name(card, ranks, dtype),
        f"{card}, {ranks} ranks, {dtype}",
        lambda path: read(path, card, ranks, dtype),
    )


def read(path: Path, card: str, ranks: int, dtype: str) -> ExchangeTable:
    """Return the table in the file ``path``.

    Raises:
        NoTable: the file is no such table, is one of another card, number of ranks or dtype, or has
            times that cannot be right.
    """
    found = tuned_tables.contents(path)
    wanted = {"card": card, "ranks": ranks, "dtype": dtype}
    measured_tables.check_conditions(path, found, wanted)
    hidden = found[MEASURED].get("hidden")
    if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden < 1:
        raise NoTable(f"{path} states no hidden size")
    parts = [_times(path, found, name) for name in (ALL_REDUCE, EXCHANGE)]
    return ExchangeTable(hidden, *parts)


def _times(path: Path, found: Mapping[str, Any], part: str) -> Times:
    """Return the times of one part of a file.

    Raises:
        NoTable: a size or a time is no positive number, or a larger size takes much less time.
    """
    times = measured_tables.rows(path, found, part, "exchanges")
    _check_rise(path, part, times)
    return times


def _check_rise(path: Path, part: str, times: Times) -> None:
    """Raise NoTable if a larger size takes much less time than a smaller one."""
    slowest: dict[str, tuple[float, int]] = {}
    for size, row in times.items():
        for way, spent in row.items():
            most, at = slowest.get(way, (0.0, size))
            if spent < LEAST_SHARE * most:
                raise NoTable(
                    f"{path} has times that fall: {part} by {way} of {size} takes {spent:g} us, "
                    f"of {at} {most:g} us"
                )
            slowest[way] = max((most, at), (spent, size))


def fastest_up_to(times: Times, way: str, others: Collection[str], above: int = 0) -> int:
    """Return the largest size up to which ``way`` is nowhere slower than any of ``others``.

    The result is ``above`` if it is slower at the first size above it, or was not measured there.

    Args:
        times: times in ascending order of sizes.
        way: the way in question.
        others: the ways it is compared with; those that were not measured at a size do not count.
        above: only larger sizes are compared.
    """
    most = above
    for size, row in times.items():
        if size <= above:
            continue
        if way not in row or any(row[way] > row[other] for other in others if other in row):
            break
        most = size
    return most


def write(path: Path, measured: Mapping[str, Any], parts: Mapping[str, Times]) -> None:
    """Write a table atomically.

    Args:
        path: the file, see ``file_name`` and ``tuned_tables.path_to_write``.
        measured: the conditions: "card", "ranks", "dtype", "hidden" and others.
        parts: times by part.
    """
    measured_tables.write(path, measured, parts)
    exchange_table.cache_clear()
