"""Responses kept in memory, bounded in number and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from glowplug.core.errors import RequestError


@dataclass(slots=True)
class StoredResponse:
    """A response and the input that it answers.

    Attributes:
        id: id of the response.
        previous: id of the response that it continues; None: it begins a conversation.
        items: the items of its input, as JSON, oldest first.
        body: the response object as JSON.
        rid: id of the running job; "": the response has ended.
    """

    id: str
    previous: str | None
    items: bytes
    body: bytes
    rid: str = ""

    @property
    def size(self) -> int:
        """Bytes that count towards the limit of the store."""
        return len(self.items) + len(self.body) + len(self.id)


class ResponseStore:
    """The responses that clients may continue or read.

    If a limit is exceeded, the responses whose last use is oldest are removed. A response is never
    removed before those that continue it, because a use of one counts as a use of all before it.

    Args:
        max_count: most responses; 0: nothing is kept.
        max_bytes: most bytes of all responses.

    Attributes:
        bytes: size of all responses.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        """True if the store keeps responses."""
        return self._max_count > 0

    def add(self, response: StoredResponse) -> None:
        """Keep a response."""
        self._kept[response.id] = response
        self.bytes += response.size
        self._touch(response)
        self._shrink()

    def finish(self, id: str, body: bytes) -> None:
        """Replace the object of a response that has ended, unless it was removed meanwhile."""
        found = self._kept.get(id)
        if found is not None:
            self.bytes += len(body) - len(found.body)
            found.body = body
            found.rid = ""
            self._shrink()

    def get(self, id: str) -> StoredResponse:
        """Return a response.

        Raises:
            RequestError: there is none with this id (404).
        """
        found = self._kept.get(id)
        if found is None:
            raise _missing(id, None)
        self._touch(found)
        return found

    def chain(self, id: str | None) -> list[StoredResponse]:
        """Return a response and all that it continues, oldest first; [] for None.

        Raises:
            RequestError: one of them is not there (404).
        """
        found: list[StoredResponse] = []
        while id is not None:
            one = self._kept.get(id)
            if one is None:
                raise _missing(id, "previous_response_id")
            found.append(one)
            id = one.previous
        if found:
            self._touch(found[0])
        return found[::-1]

    def delete(self, id: str) -> None:
        """Remove a response.

        Raises:
            RequestError: there is none with this id (404).
        """
        if not self.discard(id):
            raise _missing(id, None)

    def discard(self, id: str) -> bool:
        """Remove a response, and return whether there was one with this id."""
        found = self._kept.pop(id, None)
        if found is not None:
            self.bytes -= found.size
        return found is not None

    def _touch(self, response: StoredResponse) -> None:
        """Count a use of a response, and of those that it continues."""
        one: StoredResponse | None = response
        while one is not None:
            self._kept.move_to_end(one.id)
            one = self._kept.get(one.previous) if one.previous is not None else None

    def _shrink(self) -> None:
        """Remove responses until the limits hold."""
        while self._kept and (len(self._kept) > self._max_count or self.bytes > self._max_bytes):
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= oldest.size


def _missing(id: str, param: str | None) -> RequestError:
    return RequestError(
        f"no response with the id {id[:64]!r}: it was not stored, was deleted, or gave way to "
        "newer ones",
        code="response_not_found",
        param=param,
        status=404,
    )
