"""The byte budget of a step equals the bytes that its layers and its sampler allocate, traced
without a GPU.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from tests.gpu.traced_memory import CASES
from tests.support import uninterpreted

NEAR = 0.05
SMALL = 1 << 20  #: bytes of indices and other small tensors, which are estimated by the token
QUICK = ("v2-lite", "v3, few tokens", "tiny llama")


def check(names: list[str]) -> None:
    """Run the cases in a process of their own, in which Triton does not interpret."""
    done = uninterpreted.run("-m", "tests.gpu.traced_memory", *names)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr[-3000:]
    for name, lines in json.loads(found[-1]).items():
        for line in ("activations", "logits"):
            planned, traced = lines[line]
            assert abs(planned - traced) <= max(NEAR * traced, SMALL), (name, line, planned, traced)


def test_planned_bytes_are_the_allocated_bytes() -> None:
    check(list(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_every_case(name: str) -> None:
    check([name])
