"""Modes of a step, and the level at which a component can run in each. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum


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


EVERY_MODE_EAGER: Mapping[Mode, Capture] = dict.fromkeys(Mode, Capture.EAGER)
EVERY_MODE_GRAPH: Mapping[Mode, Capture] = dict.fromkeys(Mode, Capture.GRAPH)
