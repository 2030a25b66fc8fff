"""GPUs without access to each other's memory exchange by NCCL alone, and the log says why. Here
gloo takes NCCL's part, on CPU ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.plans import bare_plan

pytest.importorskip("triton")

from glowplug.plugins.collectives import peer_memory_runtime
from glowplug.plugins.collectives.peer_memory import PeerMemoryOptions
from glowplug.plugins.collectives.peer_memory_runtime import PeerMemory
from glowplug.plugins.collectives.torch_distributed_runtime import Gloo, Nccl

RANKS = 2


class StandInGroup:
    """A ``PeerGroup`` that needs no GPU and exchanges nothing."""

    made: list[StandInGroup] = []

    def __init__(self, name: str, rank: int, *more: object) -> None:
        self.rank = rank
        self.closed = False
        self.made.append(self)

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("peers' memory is not to be used")

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_axis_group", "_sum", "close"):
        monkeypatch.setattr(Nccl, name, getattr(Gloo, name))
    alarm = SimpleNamespace(seen=torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(peer_memory_runtime, "Alarm", lambda device: alarm)
    monkeypatch.setattr(peer_memory_runtime, "PeerGroup", StandInGroup)
    StandInGroup.made.clear()
    yield


def ranks(body: Callable[[PeerMemory, int], Any]) -> list[Any]:
    """Run ``body`` on two ranks at once, and return its results by rank."""
    plan = replace(bare_plan(), mesh={"tp": RANKS})
    store = HashStore()

    def one(rank: int) -> Any:
        worker = Worker(rank=rank, ranks=RANKS, coordinates={"tp": rank})
        held = PeerMemory(PeerMemoryOptions(timeout=30), plan, worker, store)
        try:
            return body(held, rank)
        finally:
            held.close()

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def exchanged(held: PeerMemory, rank: int) -> tuple[str, Tensor, Tensor, Tensor]:
    x = torch.arange(4.0).view(2, 2) + 10 * rank
    assert held.expert_rows("tp", 8, 2, 4, "float32") is None
    return (
        held.replaced,
        held.all_reduce(x.clone(), "tp"),
        held.all_gather(x, "tp"),
        held.reduce_scatter(x.clone(), "tp"),
    )


@pytest.mark.parametrize("without", [{0, 1}, {0}, {1}], ids=["both", "rank 0", "rank 1"])
def test_ranks_without_access_to_peers_exchange_by_nccl(
    without: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks do, also those with access, and give up the memory that they share. Only rank 0
    logs the reason.
    """
    # the GPU of the peer that rank r names is 1 - r
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda own, peer: 1 - peer not in without
    )
    monkeypatch.setattr(logging.getLogger("glowplug"), "propagate", True)
    with caplog.at_level(logging.WARNING, "glowplug"):
        found = ranks(exchanged)
    first = torch.arange(4.0).view(2, 2)
    for rank, (replaced, total, every, part) in enumerate(found):
        assert replaced == f"GPU 0 has no access to the memory of GPU {1 - min(without)}"
        assert torch.equal(total, 2 * first + 10)
        assert torch.equal(every, torch.cat([first, first + 10]))
        assert torch.equal(part, (2 * first + 10)[rank : rank + 1])
    warnings = [one.getMessage() for one in caplog.records if "NCCL alone" in one.getMessage()]
    assert len(warnings) == 1 and found[0][0] in warnings[0]
    assert len(StandInGroup.made) == RANKS - len(without)
    assert all(group.closed for group in StandInGroup.made)


def test_ranks_with_access_use_peers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: True)
    assert ranks(lambda held, rank: held.replaced) == ["", ""]
    with pytest.raises(AssertionError, match="not to be used"):
        ranks(lambda held, rank: held.all_reduce(torch.ones(2), "tp"))
