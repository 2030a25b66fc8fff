"""A rank's report of its own failure: a stack for faults, the message alone for errors that the
operator can mend.
"""

from __future__ import annotations

import pytest

from glowplug.core.errors import CollectiveError, WeightError
from glowplug.core.step.messages import Failed, decode_outbound
from glowplug.plugins.executors.ranks.process import RankLink


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
