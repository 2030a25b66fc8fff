"""Protocol of kernel tuners: layer shapes in, tables of measurements out.

A plugin returns its tuners from the hook ``tuners``; ``glowplug tune NAME`` runs one. Tables are
stored where the plugin's own runtime reads them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from glowplug.core.protocols.quantization import ExpertsShape, LinearShape

Log = Callable[[str], None]  #: callback for one log line


@dataclass(frozen=True)
class LayerShapes:
    """The distinct layer shapes of a model on one rank.

    Attributes:
        linears: shapes of linear layers.
        experts: shapes of routed experts.
        quantized: names (prefixes for experts) of the layers whose weights the scheme stores in
            another form than the compute dtype.
        topk: number of routed experts chosen for a token, without a fused shared expert.
    """

    linears: tuple[LinearShape, ...]
    experts: tuple[ExpertsShape, ...]
    quantized: frozenset[str]
    topk: int


@dataclass(frozen=True)
class TuneTable:
    """One file of measurements.

    Attributes:
        label: name of the table for messages.
        path: the file.
        rows: numbers of tokens to be measured.
        done: numbers of tokens that the file has measurements for.
        problem: the tuner's own data.
    """

    label: str
    path: Path
    rows: tuple[int, ...]
    done: tuple[int, ...]
    problem: Any = None

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of tokens still to be measured."""
        return tuple(row for row in self.rows if row not in self.done)


class TableTuner(Protocol):
    """A tuner that measures on the device it runs on.

    Both methods may be called again at any time; finished measurements are kept.
    """

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        """Return every table that these layers need.

        Args:
            shapes: the layers.
            rows: numbers of tokens to be measured; (): the tuner's default numbers.
        """
        ...

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        """Measure the missing rows of a table and write each at once; stop after ``seconds``."""
        ...
