"""Control messages over several ranks: each rank runs the handler, and rank 0 sends the reply.

A single rank exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from glowplug.core.errors import RequestError
from glowplug.core.protocols import Collectives
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.step.messages import Control, Reply

ControlHandler = Callable[[dict[str, Any]], dict[str, Any]]


def forget_load(parallel: ParallelStack) -> dict[str, Any]:
    """Let the counts of the experts' load start anew, and return an empty reply."""
    parallel.forget_load()
    return {}


class RankControls:
    """Handlers of Control messages, run on every rank in the same order.

    A handler may use collectives. It refuses with a RequestError; any other exception ends the
    rank.

    Args:
        handlers: handler by action.
        collectives: the collectives over all ranks.
        ranks: number of ranks.
    """

    def __init__(
        self, handlers: Mapping[str, ControlHandler], collectives: Collectives, ranks: int
    ) -> None:
        self._handlers = dict(handlers)
        self._collectives = collectives
        self._ranks = ranks
        self._decoder = msgspec.msgpack.Decoder(Reply)

    def add(self, action: str, handler: ControlHandler) -> None:
        """Set the handler of an action, in place of an earlier one."""
        self._handlers[action] = handler

    def handle(self, message: Control) -> Reply:
        """Run the handler of a message on every rank.

        Returns:
            The same reply on every rank: the lowest rank's refusal if any rank refuses, else rank
            0's data, with the data of all ranks under "ranks".
        """
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
        """Return True if ``holds`` is True on every rank.

        All ranks must call this, since they exchange their values once.
        """
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
