"""Messages between the front end (server or ``LLM``) and the engine, as msgpack bytes.

The front end sends lists of :data:`Inbound`, the engine lists of :data:`Outbound`. Pickle is never
used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from copy import copy
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from glowplug.core.step.draft_counts import DraftCounts, summed as summed_drafts
from glowplug.core.step.request import Admission, SamplingParams


class Submit(msgspec.Struct, tag="s", array_like=True):
    """A new sequence.

    In ``params``, ``n`` is 1, and the front end has set ``max_tokens`` and ``seed``.
    """

    id: int
    prompt: bytes  #: token ids, packed by :func:`packed_ids`
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    stop_ids: list[int] = []
    #: seconds from receipt after which the sequence ends with reason "timeout"; 0: none
    timeout: float = 0.0
    queue_timeout: float = 0.0  #: seconds that it may wait in the queue; 0: no limit

    @property
    def admission(self) -> Admission:
        """Priority, salt and limits in time; they are separate fields of the message."""
        return Admission(self.priority, self.salt, self.timeout, self.queue_timeout)

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The prompt, int32 [n]."""
        return np.frombuffer(self.prompt, np.int32).copy()


class Abort(msgspec.Struct, tag="a", array_like=True):
    """A request to end sequences now; unknown ids are ignored.

    ``reason`` becomes their finish reason. With ``reason="stop"`` the front end reports a matched
    stop string, since the engine does not process text.
    """

    ids: list[int]
    reason: str = "abort"


class Control(msgspec.Struct, tag="c", array_like=True):
    """A query or command outside the token path; the :class:`Reply` has the same ``id``.

    Actions: "flush" (drop the prefix cache), "info" (sizes, memory, budget), "check" (integrity of
    pool and cache), "memory" (bytes now), "forget_load" (count the load of experts anew),
    "streams" (residual streams and logits of given tokens), "profile_start", "profile_stop".
    """

    id: int
    action: str
    args: dict[str, Any] = {}


Inbound = Submit | Abort | Control


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of consecutive tokens of one sequence.

    Attributes:
        token: log-probability of each token.
        top_ids: ids of the k most likely tokens in place of each token, best first.
        top: their log-probabilities.
    """

    token: list[float]
    top_ids: list[list[int]]
    top: list[list[float]]

    def extend(self, later: Logprobs) -> None:
        """Append the log-probabilities of the tokens that follow."""
        self.token.extend(later.token)
        self.top_ids.extend(later.top_ids)
        self.top.extend(later.top)


class Finished(msgspec.Struct, array_like=True):
    """The end of a sequence.

    Attributes:
        id: the sequence.
        reason: stop, length, abort, timeout or error.
        stop_id: the token that ended the sequence, if one did.
        error: the error message.
        error_code: the error code.
    """

    id: int
    reason: str
    stop_id: int | None = None
    error: str | None = None
    error_code: str | None = None


class Admitted(msgspec.Struct, array_like=True):
    """The first admission of a sequence.

    Attributes:
        id: the sequence.
        queued: seconds that the sequence waited in the queue.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    id: int
    queued: float
    cached_tokens: int


class Stats(msgspec.Struct, array_like=True):
    """Gauges, and counters since the start, for /metrics and the log line.

    Attributes:
        running: sequences in rows of the sequence table.
        waiting: sequences in the queue.
        pending_tokens: prompt tokens of running and waiting sequences that are not computed yet;
            of waiting sequences without those that are expected to be cached.
        pages_total: pages of the KV pool without the scratch page.
        pages_free: pages that hold nothing.
        pages_evictable: pages of the prefix cache that no sequence uses.
        page_size: tokens per page.
        steps: steps of this group.
        prompt_tokens: prompt tokens of admitted sequences.
        cached_tokens: those of them found in the prefix cache.
        output_tokens: tokens generated.
        preemptions: times that a sequence was preempted.
        aborted: sequences that ended with another reason than "stop" and "length".
        finished: sequences that ended with "stop" or "length".
        prefix_queries: look-ups in the prefix cache, one per admission.
        prefix_hits: look-ups that found a prefix.
        prefix_query_tokens: prompt tokens looked up at a first admission.
        prefix_hit_tokens: looked-up prompt tokens that were found in the prefix cache.
        tier_hits: admissions that brought pages back from the prefix cache's tier.
        tier_hit_tokens: tokens that they brought back.
        tier_pages, tier_pages_total: pages in the tier, and its slots; set by the engine.
        tier_pages_out, tier_pages_back: pages copied to and from the tier; set by the engine.
        tier_bytes_out, tier_bytes_back: their bytes on each rank; set by the engine.
        step_seconds: time in steps of this group.
        bubble_seconds: the part of ``step_seconds`` in which the device waited for the host.
        busy_seconds: time in steps of any group; token rates are computed over it.
        group: the data-parallel group of these statistics.
        drafted_tokens, accepted_tokens: drafts verified and accepted, the totals of ``drafts``.
        drafts: verify steps by shape of the drafts; set by the engine.
        acceptance_falls: times that the acceptance of drafts has fallen; set by the engine.
        masked_steps: steps with a mask of a grammar; set by the engine.
        mask_waits: those of them in which the device waited for the mask.
        mask_seconds: host time spent on masks.
        mask_wait_seconds: time between the end of the model's pass and the masks on the device.
    """

    running: int = 0
    waiting: int = 0
    pending_tokens: int = 0
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
    group: int = 0
    drafts: list[DraftCounts] = []
    acceptance_falls: int = 0
    masked_steps: int = 0
    mask_waits: int = 0
    mask_seconds: float = 0.0
    mask_wait_seconds: float = 0.0
    tier_hits: int = 0
    tier_hit_tokens: int = 0
    tier_pages: int = 0
    tier_pages_total: int = 0
    tier_pages_out: int = 0
    tier_pages_back: int = 0
    tier_bytes_out: int = 0
    tier_bytes_back: int = 0


#: fields of ``Stats`` that are not added up over groups as numbers
SHARED = frozenset({"page_size", "group", "drafts"})
#: fields of ``Stats`` of which the maximum over groups is taken: they differ only by the age of
#: the reports
GREATEST = ("busy_seconds",)


def total(groups: Iterable[Stats]) -> Stats:
    """Return the statistics of the whole engine from those of its groups (at least one)."""
    first, *others = groups
    if not others:
        return first
    summed = copy(first)
    summed.drafts = summed_drafts(stats.drafts for stats in (first, *others))
    for name in Stats.__struct_fields__:
        if name not in SHARED:
            values = [getattr(stats, name) for stats in (first, *others)]
            setattr(summed, name, max(values) if name in GREATEST else sum(values))
    return summed


class StepOutput(msgspec.Struct, tag="o", array_like=True):
    """The output of one committed step, in columns.

    Attributes:
        ids: sequences that gained tokens.
        tokens: their tokens; a token that ends a sequence (eos) is included.
        counts: number of consecutive entries of ``tokens`` of each sequence; []: one each.
        logprobs: (id, log-probabilities) of the sequences that request them.
        prompt_logprobs: the same for prompt tokens.
        admitted: first admissions since the last output.
        prefilled: (id, seconds from admission to the first token) of the sequences whose first
            token is among ``tokens``; set by the engine.
        finished: ends of sequences.
        stats: statistics, if they are due.
        drafts: drafts that each decoding row verified in the step; set by the engine.
        prompted: sequences whose tokens come from the end of their prompt, also of one that was
            computed again; [] without drafts. Set by the engine.
        fewer: number of drafts of each sequence that verified fewer than ``drafts``; set by the
            engine.
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
    drafts: int = 0
    prompted: list[int] = []
    fewer: dict[int, int] = {}

    def drafts_of(self, id: int) -> int:
        """Return the number of drafts that a sequence verified in the step."""
        return 0 if id in self.prompted else self.fewer.get(id, self.drafts)


class Reply(msgspec.Struct, tag="r", array_like=True):
    """The reply to a Control."""

    id: int
    ok: bool
    data: dict[str, Any] = {}
    error: str = ""


class RunningCall(msgspec.Struct, array_like=True, frozen=True):
    """A call of a component, or of a plugin's hook, that has not returned.

    Attributes:
        owner: the component or the plugin, with its distribution and version.
        method: the called method or hook.
        fix: what the operator can do if the call never returns.
        waits: True: a call of the collectives, which may wait for another rank.
    """

    owner: str
    method: str
    fix: str
    waits: bool = False

    def __str__(self) -> str:
        return f"{self.method} of {self.owner}"


class Progress(msgspec.Struct, tag="p", array_like=True):
    """A progress report or heartbeat of a rank.

    Attributes:
        rank: the rank.
        phase: "build", "weights", "kernels", "kv", "capture", "self-test", "ready", "serve" or
            "ended".
        done: completed units of the phase.
        total: all units of the phase; 0: this is no progress report.
        note: a line for the log of the process that started the rank.
        call: the call in which a starting rank was at a heartbeat; None: in no plugin's code.
    """

    rank: int
    phase: str
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    note: str = ""
    call: RunningCall | None = None


class Failed(msgspec.Struct, tag="f", array_like=True):
    """The failure of a rank, which ends the engine.

    Attributes:
        rank: the rank.
        phase: the phase in which it failed.
        reason: the error.
        traceback: its stack; may be empty.
        consequence: True: the rank only lost a peer; the cause is elsewhere.
        stuck: True: the rank is alive, but its loop stands still.
    """

    rank: int
    phase: str
    reason: str
    traceback: str = ""
    consequence: bool = False
    stuck: bool = False


Outbound = StepOutput | Reply | Progress | Failed


class Turn(msgspec.Struct, array_like=True):
    """The input of one turn of the loop, which rank 0 broadcasts to every rank.

    Attributes:
        now: rank 0's monotonic time, in seconds.
        frames: the front end's frames, in order.
        stop: True: the front end has gone; every rank leaves its loop.
        grammars: (sequence id, error) of sequences whose grammar rank 0 has compiled; "": it is
            good.
        failed: (sequence id, error) of the sequences of rank 0's group that a component's failed
            call has ended since the last turn.
    """

    now: float
    frames: list[bytes] = []
    stop: bool = False
    grammars: list[tuple[int, str]] = []
    failed: list[tuple[int, str]] = []


_encoder = msgspec.msgpack.Encoder()
_inbound = msgspec.msgpack.Decoder(list[Inbound])
_outbound = msgspec.msgpack.Decoder(list[Outbound])
_turn = msgspec.msgpack.Decoder(Turn)


def packed_ids(ids: Seq[int] | NDArray[Any]) -> bytes:
    """Return token ids as consecutive int32 bytes, which are decoded without a loop."""
    return np.asarray(ids, np.int32).tobytes()


def encode(messages: list[Any]) -> bytes:
    """Return a list of messages as one msgpack frame."""
    return _encoder.encode(messages)


def encode_turn(turn: Turn) -> bytes:
    return _encoder.encode(turn)


def decode_turn(data: bytes) -> Turn:
    return _turn.decode(data)


def decode_inbound(data: bytes) -> list[Inbound]:
    return _inbound.decode(data)


def decode_outbound(data: bytes) -> list[Outbound]:
    return _outbound.decode(data)
