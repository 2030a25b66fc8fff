"""The asyncio interface of the engine: one :class:`EngineClient` on the server's event loop.

A pump thread waits for the executor's frames and passes the decoded messages to the loop.
Everything else runs on the loop. Closing or cancelling a ``generate`` iterator aborts its sequence,
so the pages of a disconnected client are freed at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from glowplug.core.errors import EngineDead, QueueFull, RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import ServerOptions
from glowplug.core.protocols import Executor
from glowplug.core.step.draft_counts import DraftCounts
from glowplug.core.step.messages import (
    Control,
    Inbound,
    Outbound,
    Reply,
    Stats,
    decode_outbound,
    encode,
)
from glowplug.core.step.request import DEFAULT_ADMISSION, Admission, SamplingParams
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.front.front import CheckedRequest, Front, Stream
from glowplug.entrypoints.front.recent_drafts import RecentDrafts

__all__ = ["Delta", "EngineClient"]

POLL_SECONDS = 0.25  #: longest wait of the pump thread for a frame before it checks for the end
HEARTBEAT_LIMIT = 10.0  #: seconds without a frame after which the engine is unhealthy


class _Mailbox:
    """A queue of the output deltas of one sequence, with one consumer. ``put`` never blocks.

    Args:
        interval: least number of tokens of a delta, except for the first and the last; smaller
            deltas are merged. 1: deltas are passed on as they come.
        loop: the event loop.

    Attributes:
        _open: True while the last delta is held back because it has fewer than ``interval`` tokens.
    """

    __slots__ = ("_interval", "_items", "_loop", "_open", "_started", "_waiter")

    def __init__(self, interval: int, loop: asyncio.AbstractEventLoop) -> None:
        self._interval = interval
        self._loop = loop
        self._items: deque[Delta | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._started = False
        self._open = False

    def put(self, item: Delta | Exception) -> None:
        """Add a delta, or an exception for ``get`` to raise."""
        last = self._items[-1] if self._open else item
        if self._open and isinstance(item, Delta) and isinstance(last, Delta):
            last.merge(item)
        else:
            last = item
            self._items.append(item)
        self._open = (
            self._started
            and isinstance(last, Delta)
            and last.finish_reason is None
            and len(last.token_ids) < self._interval
        )
        self._started = True
        if self._waiter is not None and self.ready and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def ready(self) -> bool:
        """True if ``get`` would return without waiting."""
        return len(self._items) > self._open

    async def get(self) -> Delta:
        """Wait for the next delta and return it."""
        while not self.ready:
            self._waiter = self._loop.create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        item.more = self.ready
        return item


class EngineClient:
    """The asyncio client of an engine. Call ``start`` before ``generate``.

    It is not thread-safe: all of its methods run on the loop.

    Args:
        plan: the engine's plan.
        tokenizer: None if the engine runs without one.
        eos_ids: ids that end a sequence.
        progress: returns the start-up phase of each rank, as the executor states it.

    Attributes:
        plan: the engine's plan.
        tokenizer: None if the engine runs without one.
        state: "starting", "ready", "draining" or "dead".
        reason: the reason for the state "dead".
    """

    def __init__(
        self,
        plan: EnginePlan,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        progress: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.state = "starting"
        self.reason = ""
        self._progress = progress
        self._front = Front(plan, tokenizer, eos_ids)
        self._drafts = RecentDrafts()
        self._executor: Executor | None = None
        self._mail: dict[int, _Mailbox] = {}
        self._requests: defaultdict[str, list[Stream]] = defaultdict(list)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._control_id = 0
        self._outgoing: list[Inbound] = []
        self._interval = ServerOptions.model_validate(plan.config.get("server", {})).stream_interval
        self._stopping = threading.Event()
        self._dead = asyncio.Event()
        self._pump: threading.Thread | None = None

    # ---- life ------------------------------------------------------------------------------------

    async def start(self, make: Callable[[], Executor]) -> None:
        """Start the executor and begin to serve.

        Args:
            make: loads the model and starts the executor; called in a thread.

        Raises:
            EngineDead, PlanRefused: ``make`` failed.
        """
        try:
            self._executor = await asyncio.to_thread(make)
        except BaseException as error:
            self._die(str(error))
            raise
        if self._stopping.is_set():
            self._executor.stop()
            return
        self._pump = threading.Thread(
            target=self._pump_frames,
            args=(asyncio.get_running_loop(),),
            daemon=True,
            name="glowplug-pump",
        )
        self._front.last_received = time.monotonic()
        self.state = "ready"
        self._pump.start()

    async def drain(self, timeout: float) -> bool:
        """Refuse new sequences and wait until the running ones end.

        Returns:
            False if some still run after ``timeout`` seconds.
        """
        if self.state == "ready":
            self.state = "draining"
        deadline = time.monotonic() + timeout
        while self._mail and self.state == "draining" and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._mail

    async def close(self) -> None:
        """Stop the ranks. Sequences that still run end with EngineDead."""
        self._stopping.set()
        self._die("the server is shutting down")
        if self._executor is not None:
            await asyncio.to_thread(self._executor.stop)
        if self._pump is not None:
            await asyncio.to_thread(self._pump.join, 5.0)

    async def wait_dead(self) -> str:
        """Wait until the engine is dead, and return the reason."""
        await self._dead.wait()
        return self.reason

    def healthy(self) -> bool:
        """Return True if the engine is starting, or sent messages in the last HEARTBEAT_LIMIT s."""
        if self.state == "starting":
            return True
        return (
            self.state != "dead" and time.monotonic() - self._front.last_received < HEARTBEAT_LIMIT
        )

    def stats(self) -> Stats:
        """Return the engine's latest statistics over all data-parallel groups."""
        return self._front.stats

    def recent_drafts(self) -> list[DraftCounts]:
        """Return the engine's counters of verified drafts over the last minute."""
        return self._drafts.counts(time.monotonic(), self._front.stats.drafts)

    def group_stats(self) -> list[Stats]:
        """Return the latest statistics of each data-parallel group, ordered by group number."""
        return [stats for _, stats in sorted(self._front.groups.items())]

    @property
    def progress(self) -> dict[int, str]:
        """The start-up phase of each rank, with its completed share: "weights 41%".

        It is empty once the ranks are ready, and for executors that do not state it.
        """
        return dict(self._progress()) if self.state == "starting" else {}

    # ---- requests --------------------------------------------------------------------------------

    def check(self, prompt_ids: list[int], params: SamplingParams) -> CheckedRequest:
        """Check a prompt and its parameters, and return the request for ``generate``.

        Args:
            prompt_ids: token ids of the prompt.
            params: sampling parameters; ``n`` is ignored.

        Raises:
            RequestError: the request cannot be served.
        """
        return self._front.check(prompt_ids, params)

    async def generate(
        self, request: CheckedRequest, *, request_id: str, admission: Admission = DEFAULT_ADMISSION
    ) -> AsyncIterator[Delta]:
        """Run one sequence and yield its output deltas; the last one has ``finish_reason``.

        Args:
            request: the prompt and its parameters.
            request_id: id for :meth:`abort`; several sequences can have the same.
            admission: priority, prefix-cache salt and limits in time.

        Raises:
            RequestError: the engine cannot serve the request.
            QueueFull: the engine's queue is full.
            EngineDead: the engine has stopped, or is not ready.
        """
        if self.state != "ready":
            raise EngineDead(self.reason or f"the engine is {self.state}")
        stream, message = self._front.submit(request, admission)
        mail = self._mail[stream.id] = _Mailbox(self._interval, asyncio.get_running_loop())
        self._requests[request_id].append(stream)
        self._send(message)
        try:
            while not stream.done or mail.ready:
                delta = await mail.get()
                if delta.finish_reason == "error" and delta.error_code in (
                    "queue_full",
                    "context_length_exceeded",
                    "kv_too_small",
                    "invalid_request",
                ):
                    raise _to_exception(delta)
                yield delta
        finally:
            self._forget(request_id, stream)

    def _forget(self, request_id: str, stream: Stream) -> None:
        """Remove a sequence from the client's tables; abort the sequence if it still runs."""
        self._mail.pop(stream.id, None)
        group = self._requests[request_id]
        if stream in group:
            group.remove(stream)
        if not group:
            del self._requests[request_id]
        abort = self._front.abandon([stream])
        if abort is not None:
            self._send(abort)

    async def abort(self, request_id: str) -> None:
        """End every sequence of the request with reason "abort". Unknown ids are ignored."""
        self._end(self._requests.get(request_id, []))

    async def abort_all(self) -> None:
        """End every sequence with reason "abort"."""
        self._end([stream for group in self._requests.values() for stream in group])

    def _end(self, streams: list[Stream]) -> None:
        from glowplug.core.step.messages import Abort

        live = [stream.id for stream in streams if not stream.done]
        if live:
            self._send(Abort(live))

    async def control(self, action: str, **args: Any) -> dict[str, Any]:
        """Send a control (a command besides requests) to the engine and return the reply's data.

        Args:
            action: "flush", "info", "check", "memory", "forget_load", "streams",
                "profile_start" or "profile_stop"; see ``messages.Control``.
            args: arguments of the action.

        Raises:
            RequestError: the engine refused the control.
            EngineDead: the engine has stopped, or is not ready.
        """
        if self.state not in ("ready", "draining"):
            raise EngineDead(self.reason or f"the engine is {self.state}")
        self._control_id += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[self._control_id] = future
        self._send(Control(self._control_id, action, args))
        reply = await future
        if not reply.ok:
            raise RequestError(reply.error)
        return reply.data

    # ---- bytes -----------------------------------------------------------------------------------

    def _send(self, message: Inbound) -> None:
        """Queue a message to the engine. One iteration of the loop sends one frame."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        outgoing = self._outgoing
        self._outgoing = []
        if outgoing and self._executor is not None:
            self._executor.submit(encode(outgoing))

    def _pump_frames(self, loop: asyncio.AbstractEventLoop) -> None:
        """Decode the engine's frames and pass them to the event loop until the engine ends.

        The method runs in a thread of its own.
        """
        assert self._executor is not None
        try:
            while not self._stopping.is_set():
                frame = self._executor.outputs(POLL_SECONDS)
                if frame:
                    loop.call_soon_threadsafe(self._dispatch, decode_outbound(frame))
        except EngineDead as error:
            if not self._stopping.is_set():
                loop.call_soon_threadsafe(self._die, str(error))
        except RuntimeError:
            return  # the loop is closed: the server has ended

    def _dispatch(self, messages: list[Outbound]) -> None:
        """Deliver the messages of a frame to the sequences and controls that wait for them."""
        received = self._front.receive(messages)
        self._drafts.note(self._front.last_received, self._front.stats.drafts)
        for stream, delta in received.deltas:
            mail = self._mail.get(stream.id)
            if mail is not None:
                mail.put(delta)
        for reply in received.replies:
            future = self._replies.pop(reply.id, None)
            if future is not None and not future.done():
                future.set_result(reply)
        if self._front.outbox:
            for message in self._front.outbox:
                self._send(message)
            self._front.outbox = []

    def _die(self, reason: str) -> None:
        """Set the state to dead and end every sequence and control with EngineDead."""
        if self.state == "dead":
            return
        self.state = "dead"
        self.reason = reason
        for mail in self._mail.values():
            mail.put(EngineDead(reason))
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineDead(reason))
        self._replies.clear()
        self._dead.set()


def _to_exception(delta: Delta) -> RequestError:
    """Convert a delta with an error code to the exception that reports it."""
    message = delta.error or "the request was refused"
    if delta.error_code == "queue_full":
        return QueueFull(message)
    return RequestError(message, code=delta.error_code)
