"""Modes of a step, capture levels, the base of all offers and their parts. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from glowplug.core.errors import Refusal


class Mode(StrEnum):
    """The kind of work of a step, for which components declare a ``Capture`` level."""

    PREFILL = "prefill"  #: chunks of prompts, possibly mixed with decoding rows
    DECODE = "decode"  #: one token per row
    VERIFY = "verify"  #: ``width`` tokens per row: one, and the drafted tokens
    DRAFT_DECODE = "draft_decode"  #: a pass of the draft model over one token per row
    #: the draft model's pass over the tokens of a step, which fills its KV cache
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"  #: no tokens of the rank's own: it only takes part in collectives


class Capture(IntEnum):
    """The level at which a component can run in a mode, ordered: ``NO < EAGER < GRAPH``."""

    NO = 0  #: it cannot run
    EAGER = 1  #: it runs, but waits for the host or allocates, so it cannot be captured
    GRAPH = 2  #: it runs and can be captured in a CUDA graph


#: ``Offers.modes`` of a component that runs in every mode and cannot be captured
EVERY_MODE_EAGER: Mapping[Mode, Capture] = dict.fromkeys(Mode, Capture.EAGER)
#: ``Offers.modes`` of a component that can be captured in every mode
EVERY_MODE_GRAPH: Mapping[Mode, Capture] = dict.fromkeys(Mode, Capture.GRAPH)
DEVICES = frozenset({"cpu", "cuda"})
FLOAT_DTYPES = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True)
class Offers:
    """The capabilities that a component of any slot declares.

    Attributes:
        devices: device types it runs on ("cpu", "cuda").
        compute: CUDA compute capabilities it supports (90 = SM90); if empty, all from
            ``least_compute`` on.
        least_compute: lowest compute capability it supports; 0 for no limit.
        dtypes: compute dtypes it supports, by torch's name.
        modes: capture level per mode.
        overlap: its code never waits for the device during a step, so the next step may be launched
            before the results of this one are read.
    """

    devices: frozenset[str] = DEVICES
    compute: frozenset[int] = frozenset()
    least_compute: int = 0
    dtypes: frozenset[str] = FLOAT_DTYPES
    modes: Mapping[Mode, Capture] = field(default_factory=lambda: dict(EVERY_MODE_GRAPH))
    overlap: bool = True

    def runs_on(self, cards: Iterable[int]) -> bool:
        """Return whether it supports CUDA devices of all these compute capabilities.

        Args:
            cards: compute capability of each device; an unknown one (0) always passes
                ``least_compute``.
        """
        return all(
            (not self.compute or card in self.compute) and not 0 < card < self.least_compute
            for card in cards
        )

    @cached_property
    def runs(self) -> frozenset[Mode]:
        """Modes in which it can run."""
        return frozenset(mode for mode, level in self.modes.items() if level >= Capture.EAGER)

    @cached_property
    def captures_in(self) -> frozenset[Mode]:
        """Modes in which it can be part of a captured graph."""
        return frozenset(mode for mode, level in self.modes.items() if level >= Capture.GRAPH)


HOST_MEMORY = "host memory"  #: place of a tier whose bytes the plan counts as the host's memory


@dataclass(frozen=True)
class Tier:
    """A place beside the KV pool in which a prefix cache keeps evicted pages.

    Attributes:
        option: the cache's option with the bytes of the tier on each rank; 0 bytes: no tier.
        place: where the bytes are. Host memory is refused if the host has too little.
    """

    option: str
    place: str = HOST_MEMORY


class DecidedSize(NamedTuple):
    """The size of a parallelism strategy whose option ``size`` is "auto".

    Attributes:
        size: the size; 1: the plan leaves the strategy out.
        why: reason, for the plan.
    """

    size: int
    why: str


@dataclass(frozen=True)
class AutoSize:
    """How the size of a parallelism strategy is decided whose option ``size`` is "auto".

    Attributes:
        decide: function from a ``CheckContext`` to the size, or to the refusal of "auto". The mesh
            in its values has the axes of the strategies whose size is a number.
        table_writer: ``"package.module:function"`` that writes the table of a record of ``glowplug
            tune parallel``, by which ``decide`` chooses. It receives the plan of one of the
            measured layouts and the record, and returns the path.
    """

    decide: Callable[[Any], DecidedSize | Refusal]
    table_writer: str
