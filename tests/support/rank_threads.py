"""Ranks as threads of one process: the same work on every rank of a mesh, over collectives of
choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch.distributed import HashStore

from glowplug.core.facts.mesh import coordinates
from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.threads import ThreadOptions
from glowplug.core.testing.harness.threads_runtime import MEETINGS, Meeting, ThreadCollectives
from glowplug.plugins.collectives.torch_distributed import GlooOptions
from glowplug.plugins.collectives.torch_distributed_runtime import Gloo


def on_ranks(mesh: Mapping[str, int], backend: str, body: Callable[[Any, int], Any]) -> list[Any]:
    """Run ``body(collectives, rank)`` on each of ``mesh["tp"]`` ranks, and return the results
    by rank.

    ``backend`` is "threads" or "gloo". A rank that raises ends the others' waiting, and its error
    is raised here.
    """
    plan, store, address = replace(bare_plan(), mesh=dict(mesh)), HashStore(), f"ranks-{id(body)}"
    MEETINGS[address] = Meeting()

    def one(rank: int) -> Any:
        worker = Worker(
            rank=rank, ranks=mesh["tp"], coordinates=coordinates(rank, mesh), rendezvous=address
        )
        held: Any = (
            ThreadCollectives(ThreadOptions(timeout=30), plan, worker)
            if backend == "threads"
            else Gloo(GlooOptions(timeout=30), plan, worker, store)
        )
        try:
            with MEETINGS[address].turn(rank, backend):
                return body(held, rank)
        except BaseException:
            MEETINGS[address].end()
            raise
        finally:
            held.close()

    try:
        with ThreadPoolExecutor(mesh["tp"]) as pool:
            return list(pool.map(one, range(mesh["tp"])))
    finally:
        del MEETINGS[address]
