"""The store of responses: bounds, order of removal, chains."""

from __future__ import annotations

import random

import pytest

from glowplug.core.errors import RequestError
from glowplug.entrypoints.server.responses.store import ResponseStore, StoredResponse


def response(id: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(id, previous, b"i" * (size // 2), b"b" * (size - size // 2))


def test_the_oldest_use_decides_what_is_removed() -> None:
    store = ResponseStore(3, 1 << 20)
    for id in "abc":
        store.add(response(id))
    store.get("a")
    store.add(response("d"))
    with pytest.raises(RequestError, match="'b'"):
        store.get("b")
    assert [store.get(id).id for id in "acd"] == ["a", "c", "d"]


def test_a_response_is_not_removed_before_those_that_continue_it() -> None:
    """A chain that can still be read is complete, whatever was used and removed."""
    draw = random.Random(3)
    store = ResponseStore(20, 1 << 20)
    ids: list[str] = []
    for number in range(300):
        present = [id for id in ids if id in store._kept]
        previous = draw.choice([*present, None]) if present else None
        store.chain(previous)
        store.add(response(f"r{number}", previous))
        ids.append(f"r{number}")
        for id in [id for id in ids if id in store._kept]:
            found = store.chain(id)
            assert found[-1].id == id and found[0].previous is None
    assert len(store) == 20 and store.bytes == sum(one.size for one in store._kept.values())


def test_bytes_are_bounded_while_objects_grow_and_go() -> None:
    store = ResponseStore(1000, 1000)
    for number in range(50):
        store.add(response(f"{number:02}", size=100))
        store.finish(f"{number:02}", b"x" * 150)
        assert store.bytes <= 1000
    assert store.bytes == sum(one.size for one in store._kept.values()) > 0
    store.finish("49", b"x" * 2000)
    assert len(store) == 0 == store.bytes
    store.finish("49", b"gone")
    store.add(response("new"))
    store.delete("new")
    assert len(store) == 0 == store.bytes
    with pytest.raises(RequestError):
        store.delete("new")


def test_a_chain_with_a_gap_is_refused() -> None:
    store = ResponseStore(10, 1 << 20)
    store.add(response("a"))
    store.add(response("b", "a"))
    assert [one.id for one in store.chain("b")] == ["a", "b"] and store.chain(None) == []
    store.delete("a")
    with pytest.raises(RequestError) as found:
        store.chain("b")
    assert found.value.status == 404 and found.value.param == "previous_response_id"
