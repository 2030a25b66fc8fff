"""Controls over several ranks: each rank runs the handler, rank 0 answers for all. One rank
exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from glowplug.core.errors import RequestError
from glowplug.core.protocols import Collectives
from glowplug.core.step.messages import Control, Reply

ControlHandler = Callable[[dict[str, Any]], dict[str, Any]]


class RankControls:
    """Handlers by a Control's action, run on every rank in the same order.

    A handler may itself use collectives, and refuses with a RequestError; what else it raises ends
    the rank.
    """

    def __init__(
        self, handlers: Mapping[str, ControlHandler], collectives: Collectives, ranks: int
    ) -> None:
        self._handlers = dict(handlers)
        self._collectives = collectives
        self._ranks = ranks
        self._decoder = msgspec.msgpack.Decoder(Reply)

    def add(self, action: str, handler: ControlHandler) -> None:
        """Take the action on, in place of whoever had it."""
        self._handlers[action] = handler

    def answer(self, message: Control) -> Reply:
        """The same on every rank: the lowest rank's refusal if any refuses, else rank 0's data; the
        data of all ranks goes with it under "ranks"."""
        own = self._run(message)
        if self._ranks == 1:
            return own
        found = [
            self._decoder.decode(data)
            for data in self._collectives.all_gather_bytes(msgspec.msgpack.encode(own))
        ]
        refused = next((reply for reply in found if not reply.ok), None)
        if refused is not None:
            return refused
        every = [reply.data for reply in found]
        return Reply(message.id, True, {**every[0], "ranks": every} if any(every) else {})

    def everywhere(self, holds: bool) -> bool:
        """Does it hold on every rank? One exchange; to be asked on all of them."""
        if self._ranks == 1:
            return holds
        return bool(self._collectives.all_gather_numbers(np.array([holds], np.int64)).all())

    def _run(self, message: Control) -> Reply:
        handler = self._handlers.get(message.action)
        if handler is None:
            return Reply(message.id, False, error=f"unknown action {message.action!r}")
        try:
            return Reply(message.id, True, handler(message.args))
        except RequestError as error:
            return Reply(message.id, False, error=str(error))
