"""A reader that lags gets all text in fewer writes; a stream interval makes fewer, longer
events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from glowplug.core.errors import EngineDead
from glowplug.core.step.messages import Logprobs
from glowplug.entrypoints.front.client import _Mailbox
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.server.transport.streaming import event_chunks


def delta(count: int, end: str | None = None) -> Delta:
    """Return the delta of the ``count``-th token of a sequence."""
    scores = Logprobs([-float(count)], [[count]], [[-float(count)]])
    return Delta(
        text=f"<{count}>",
        token_ids=[count],
        output_tokens=count,
        finish_reason=end,
        logprobs=scores,
    )


async def fetched(interval: int, count: int) -> list[Delta]:
    """Return the deltas that a reader finds after ``count`` tokens, the last of which ends the
    sequence.
    """
    mail = _Mailbox(interval, asyncio.get_running_loop())
    for at in range(1, count + 1):
        mail.put(delta(at, "stop" if at == count else None))
    found = []
    while mail.ready:
        found.append(await mail.get())
    return found


@pytest.mark.parametrize(
    ("interval", "cuts"), [(1, [1] * 8), (3, [1, 3, 3, 1]), (7, [1, 7]), (100, [1, 7])]
)
def test_the_first_token_is_sent_before_the_interval_begins(interval: int, cuts: list[int]) -> None:
    found = asyncio.run(fetched(interval, 8))
    assert [len(one.token_ids) for one in found] == cuts
    assert "".join(one.text for one in found) == "".join(f"<{at}>" for at in range(1, 9))
    assert [token for one in found for token in one.logprobs.token] == [
        -float(at) for at in range(1, 9)
    ]
    assert [one.more for one in found] == [True] * (len(found) - 1) + [False]
    assert found[-1].finish_reason == "stop" and found[-1].output_tokens == 8
    assert all(one.finish_reason is None for one in found[:-1])


def test_an_interval_wakes_no_reader_early() -> None:
    async def run() -> None:
        mail = _Mailbox(3, asyncio.get_running_loop())
        mail.put(delta(1))
        assert (await mail.get()).token_ids == [1]
        reader = asyncio.ensure_future(mail.get())
        for at in (2, 3):
            mail.put(delta(at))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not reader.done()
        mail.put(delta(4))
        assert (await reader).token_ids == [2, 3, 4]

    asyncio.run(run())


def test_text_from_before_the_engines_death_is_read_first() -> None:
    async def run() -> None:
        mail = _Mailbox(4, asyncio.get_running_loop())
        mail.put(delta(1))
        mail.put(delta(2))
        mail.put(EngineDead("gone"))
        assert [(await mail.get()).token_ids for _ in range(2)] == [[1], [2]]
        with pytest.raises(EngineDead):
            await mail.get()

    asyncio.run(run())


class Plain:
    """An API whose events are the texts of the deltas."""

    def add(self, index: int, delta: Delta) -> bytes:
        return delta.text.encode()

    def end(self) -> bytes:
        return b"END"


async def writes(deltas: list[Delta], failure: Exception | None = None) -> list[bytes]:
    async def source() -> AsyncGenerator[tuple[int, Delta], None]:
        for one in deltas:
            yield 0, one
        if failure is not None:
            raise failure

    found = []
    try:
        async for data in event_chunks(source(), Plain()):
            found.append(data)
    except EngineDead:
        found.append(b"FAILED")
    return found


def test_events_that_wait_are_written_together() -> None:
    several = [
        Delta("a"),
        Delta("b", more=True),
        Delta("c", more=True),
        Delta("d"),
        Delta("", more=True),
        Delta("e"),
    ]
    assert asyncio.run(writes(several)) == [b"a", b"bcd", b"e", b"END"]


def test_events_held_back_are_written_before_a_failure() -> None:
    assert asyncio.run(writes([Delta("a", more=True)], EngineDead("gone"))) == [b"a", b"FAILED"]
