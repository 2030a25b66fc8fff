"""What the byte budget says of a step is what its layers and its sampler allocate, found without a
GPU.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from tests.gpu.traced_memory import CASES
from tests.support import uninterpreted

NEAR = 0.05
SMALL = 1 << 20  #: bytes of indices and the like, which are estimated by the token
QUICK = ("v2-lite", "v3, few tokens", "tiny llama")


def check(names: list[str]) -> None:
    """In a process of its own, where Triton does not interpret."""
    done = uninterpreted.run("-m", "tests.gpu.traced_memory", *names)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr[-3000:]
    for name, lines in json.loads(found[-1]).items():
        for line in ("activations", "logits"):
            planned, traced = lines[line]
            assert abs(planned - traced) <= max(NEAR * traced, SMALL), (name, line, planned, traced)


def test_what_is_planned_is_what_is_allocated() -> None:
    check(list(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_every_case(name: str) -> None:
    check([name])
