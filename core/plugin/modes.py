"""Modes of a step, capture levels, and the base of all offers. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property


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
