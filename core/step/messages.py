"""What crosses the pipe between the front (server or ``LLM``) and the engine: msgspec structs as
msgpack bytes.

Front to engine: a list of :data:`Inbound`. Engine to front: a list of :data:`Outbound`. Never
pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from copy import copy
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from glowplug.core.step.request import SamplingParams


class Submit(msgspec.Struct, tag="s", array_like=True):
    """A new sequence. ``params.n`` is 1; ``max_tokens`` and ``seed`` are filled in by the front."""

    id: int
    prompt: bytes  #: token ids as :func:`packed_ids` has them
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    stop_ids: list[int] = []
    timeout: float = 0.0  #: seconds from receipt after which it ends with reason "timeout"; 0: none
    queue_timeout: float = 0.0  #: seconds it may wait in the queue; 0: none

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """Its prompt, unpacked."""
        return np.frombuffer(self.prompt, np.int32).copy()


class Abort(msgspec.Struct, tag="a", array_like=True):
    """End these sequences now; unknown ids are ignored. ``reason`` becomes their finish reason.

    ``reason="stop"`` is how the front reports a matched stop string (the engine does not see text).
    """

    ids: list[int]
    reason: str = "abort"


class Control(msgspec.Struct, tag="c", array_like=True):
    """A question or command outside the token path; answered by a :class:`Reply` with the same
    ``id``.

    Actions: "flush" (drop the prefix cache), "info" (sizes, memory, budget), "check" (integrity of
    pool and cache), "memory" (bytes now), "profile_start", "profile_stop".
    """

    id: int
    action: str
    args: dict[str, Any] = {}


Inbound = Submit | Abort | Control


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of consecutive tokens of one sequence.

    ``token[i]`` belongs to the i-th token; ``top_ids[i]``/``top[i]`` are the k most likely, best
    first.
    """

    token: list[float]
    top_ids: list[list[int]]
    top: list[list[float]]

    def extend(self, later: Logprobs) -> None:
        """Those of the tokens that follow."""
        self.token.extend(later.token)
        self.top_ids.extend(later.top_ids)
        self.top.extend(later.top)


class Finished(msgspec.Struct, array_like=True):
    """The end of a sequence. ``reason``: stop, length, abort, timeout, error. ``stop_id``: the
    token that ended it.
    """

    id: int
    reason: str
    stop_id: int | None = None
    error: str | None = None
    error_code: str | None = None


class Admitted(msgspec.Struct, array_like=True):
    """A sequence ran for the first time: queue time in seconds and prompt tokens found in the
    prefix cache.
    """

    id: int
    queued: float
    cached_tokens: int


class Stats(msgspec.Struct, array_like=True):
    """Gauges and counters since start, for /metrics and the log line.

    Attributes:
        prefix_queries, prefix_hits: look-ups in the prefix cache, one an admission, and those that
            found something.
        prefix_query_tokens, prefix_hit_tokens: prompt tokens looked up at a first admission, and
            those found.
        step_seconds: time in steps of this group; bubble_seconds: of it, in which the device waited
            for the host.
        busy_seconds: time in steps of any group, over which rates are formed.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_evictable: int = 0
    page_size: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    step_seconds: float = 0.0
    bubble_seconds: float = 0.0
    busy_seconds: float = 0.0
    group: int = 0  #: the data-parallel group these are of


SHARED = frozenset({"page_size", "group"})  #: of ``Stats``: not added up over groups
GREATEST = (
    "busy_seconds",
)  #: of ``Stats``: the same in all groups but for the age of each group's report


def total(groups: Iterable[Stats]) -> Stats:
    """Statistics of the whole engine from those of its groups (at least one)."""
    first, *others = groups
    if not others:
        return first
    summed = copy(first)
    for name in Stats.__struct_fields__:
        if name not in SHARED:
            values = [getattr(stats, name) for stats in (first, *others)]
            setattr(summed, name, max(values) if name in GREATEST else sum(values))
    return summed


class StepOutput(msgspec.Struct, tag="o", array_like=True):
    """All that one committed step produced. Columnar: ``ids[i]`` got the next ``counts[i]`` entries
    of ``tokens``.

    ``counts`` empty means one token each. ``logprobs`` and ``prompt_logprobs`` are (id, values) for
    the sequences that asked. The token that ends a sequence by id (eos) is included in ``tokens``.
    ``prefilled``: (id, seconds from admission to the first token) of the sequences whose first
    token is among ``tokens``; the engine fills it in.
    """

    ids: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    logprobs: list[tuple[int, Logprobs]] = []
    prompt_logprobs: list[tuple[int, Logprobs]] = []
    admitted: list[Admitted] = []
    prefilled: list[tuple[int, float]] = []
    finished: list[Finished] = []
    stats: Stats | None = None


class Reply(msgspec.Struct, tag="r", array_like=True):
    """Answer to a Control."""

    id: int
    ok: bool
    data: dict[str, Any] = {}
    error: str = ""


class Progress(msgspec.Struct, tag="p", array_like=True):
    """A rank lives. ``phase``: "build", "weights", "kernels", "kv", "capture", "self-test",
    "ready", "serve", "ended";
    done of total. ``note``: a line for the log of whoever started the rank."""

    rank: int
    phase: str
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    note: str = ""


class Failed(msgspec.Struct, tag="f", array_like=True):
    """A rank has failed; the engine is over. ``consequence``: it only lost a peer, which is to
    blame.
    """

    rank: int
    phase: str
    reason: str
    traceback: str = ""
    consequence: bool = False


Outbound = StepOutput | Reply | Progress | Failed


class Turn(msgspec.Struct, array_like=True):
    """What every rank takes in before a step, from rank 0: its time in seconds and the front's
    frames, in order.

    ``stop``: the front has gone; every rank leaves its loop.
    """

    now: float
    frames: list[bytes] = []
    stop: bool = False


_encoder = msgspec.msgpack.Encoder()
_inbound = msgspec.msgpack.Decoder(list[Inbound])
_outbound = msgspec.msgpack.Decoder(list[Outbound])
_turn = msgspec.msgpack.Decoder(Turn)


def packed_ids(ids: Seq[int] | NDArray[Any]) -> bytes:
    """int32, one behind the other: read at once, however many they are."""
    return np.asarray(ids, np.int32).tobytes()


def encode(messages: list[Any]) -> bytes:
    """A list of messages as one msgpack frame."""
    return _encoder.encode(messages)


def encode_turn(turn: Turn) -> bytes:
    return _encoder.encode(turn)


def decode_turn(data: bytes) -> Turn:
    return _turn.decode(data)


def decode_inbound(data: bytes) -> list[Inbound]:
    return _inbound.decode(data)


def decode_outbound(data: bytes) -> list[Outbound]:
    return _outbound.decode(data)
