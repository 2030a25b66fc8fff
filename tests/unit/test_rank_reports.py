"""A rank's report of its own failure: a stack for faults, the message alone for errors that the
operator can mend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from glowplug.core.engine.in_flight import InFlight
from glowplug.core.errors import CollectiveError, WeightError
from glowplug.core.step.messages import Failed, Progress, decode_outbound
from glowplug.plugins.collectives.torch_distributed_runtime import Gloo
from glowplug.plugins.executors.ranks import process
from glowplug.plugins.executors.ranks.process import RankLink, waiting_modules
from tests.support.waiting import LIMIT


class Pipe:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_bytes(self, data: bytes) -> None:
        self.sent.append(data)

    def recv_bytes(self) -> bytes:
        raise EOFError

    def poll(self, timeout: float) -> bool:
        return False


@pytest.mark.parametrize(
    ("error", "stack", "consequence"),
    [
        (WeightError("3 missing. Fix: download the files again"), False, False),
        (RuntimeError("a fault"), True, False),
        (CollectiveError("a peer has gone"), True, True),
    ],
)
def test_errors_of_the_operator_have_no_stack(
    error: Exception, stack: bool, consequence: bool
) -> None:
    pipe = Pipe()
    link = RankLink(pipe, 1)
    try:
        raise error
    except Exception as caught:
        link.failed(caught)
    (said,) = decode_outbound(pipe.sent[0])
    assert isinstance(said, Failed)
    assert (said.rank, said.consequence) == (1, consequence) and str(error) in said.reason
    assert ("Traceback" in said.traceback) == stack


class Waiting(Gloo):
    """Collectives that inherit their waits from another module, as those over peer memory do."""

    __module__ = "elsewhere"


@pytest.mark.parametrize(("ranks", "consequence"), [(1, False), (2, True)])
@pytest.mark.parametrize("place", ["exchange", "device"])
def test_a_rank_that_waits_for_others_reports_a_consequence(
    place: str, ranks: int, consequence: bool
) -> None:
    """It waits in an exchange of the host, or for its device, whose kernels wait for peers."""
    entered, ended = threading.Event(), threading.Event()

    class Links:
        def broadcast(self, data: bytes | None) -> bytes:
            entered.set()
            assert ended.wait(LIMIT)
            return b""

    class Copy:
        wait = staticmethod(lambda: [np.frombuffer(Links().broadcast(None))])

    held = Waiting.__new__(Waiting)
    held._links = Links()  # type: ignore[assignment]
    step = InFlight(None, None, [], Copy())  # type: ignore[arg-type]
    wait = (lambda: held.broadcast_bytes(None)) if place == "exchange" else step.wait
    link = RankLink(Pipe(), 1)
    link.waits_in = waiting_modules(held, ranks)
    thread = threading.Thread(target=lambda: suppressed(wait), daemon=True)
    thread.start()
    assert entered.wait(LIMIT)
    link.loop = thread.ident or 0
    said = link._stuck(10.0)
    ended.set()
    thread.join(LIMIT)
    assert said.stuck and said.consequence == (consequence or place == "exchange")


def test_a_loop_that_stands_still_is_noted_once_before_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Time:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += 4.0

    monkeypatch.setattr(process, "time", Time())
    pipe = Pipe()
    link = RankLink(pipe, 0)
    link.phase = "serve"
    link.beat_forever(30.0)
    said = [one for sent in pipe.sent for one in decode_outbound(sent)]
    noted = [one.note for one in said if isinstance(one, Progress) and one.note]
    assert len(noted) == 1 and noted[0].startswith("its loop has stood still for 12 s, in ")
    assert isinstance(said[-1], Failed) and "for 32 s" in said[-1].reason


def suppressed(work: Callable[[], object]) -> None:
    with suppress(Exception):
        work()
