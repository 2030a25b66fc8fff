"""The contract of plugins that tune kernels: layer shapes in, tables of measurements out.

A plugin names its tuners through the hook ``tuners``; ``glowplug tune NAME`` runs one. Tables are
stored where the plugin's own runtime looks for them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from glowplug.core.protocols.quantization import ExpertsShape, LinearShape

Log = Callable[[str], None]


@dataclass(frozen=True)
class LayerShapes:
    """The different products of a model on one rank. ``quantized``: names (experts: prefixes) of
    those whose weights the scheme keeps in another form than the compute dtype.

    ``topk``: experts that a token picks, those that ride along not counted.
    """

    linears: tuple[LinearShape, ...]
    experts: tuple[ExpertsShape, ...]
    quantized: frozenset[str]
    topk: int


@dataclass(frozen=True)
class TuneTable:
    """One file of measurements: ``rows`` are the numbers of tokens wanted, ``done`` those that it
    holds.
    """

    label: str
    path: Path
    rows: tuple[int, ...]
    done: tuple[int, ...]
    problem: Any = None  #: the tuner's own

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(row for row in self.rows if row not in self.done)


class TableTuner(Protocol):
    """Measures on the device it runs on. Both methods may be called again at any time: what is done
    stays done.
    """

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        """Every table that these products want. ``rows``: numbers of tokens; (): the tuner's own."""
        ...

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        """Measure the missing rows and write each as soon as it is known; stop after ``seconds``."""
        ...
