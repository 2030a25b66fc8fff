"""Which ranks this process looks after, and where the others are met: by the options, or by
torchrun's environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.plan.plan import EnginePlan
from glowplug.plugins.executors.torchrun import TorchrunOptions

LAUNCHED = "TORCHELASTIC_RUN_ID"  #: torchrun sets it in every process it starts


@dataclass(frozen=True)
class Site:
    """One of the processes that together look after all ranks: one a host, or under torchrun one a
    rank.

    Attributes:
        index, count: this one, of how many; number 0 runs the front.
        per: ranks of each site, neighbours.
        per_host: ranks of each host.
        host, port: of the store where they meet.
        serves: this site holds the store (else torchrun's agent does).
        prefix: keeps the keys of one attempt apart from those of another.
    """

    index: int
    count: int
    per: int
    per_host: int
    host: str
    port: int
    serves: bool
    prefix: str = "0"

    @property
    def ranks(self) -> range:
        return range(self.index * self.per, (self.index + 1) * self.per)

    def name(self, index: int) -> str:
        """A site in messages: "host 1 (ranks 2, 3)"."""
        first = index * self.per
        ranks = ", ".join(map(str, range(first, first + self.per)))
        return f"host {first // self.per_host} (rank{'s' if self.per > 1 else ''} {ranks})"

    @property
    def rendezvous(self) -> str:
        """For the ranks: the store is there already."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.prefix}?held"


def find_site(
    options: TorchrunOptions, plan: EnginePlan, environment: Mapping[str, str] = os.environ
) -> Site:
    """PlanRefused when the environment contradicts the plan, or nothing says where to meet."""
    if LAUNCHED in environment:
        return _launched(plan, environment)
    hosts = plan.hosts
    if options.address is None and hosts > 1:
        raise _refused(
            "executor.address",
            f"{hosts} hosts, and nothing says where they meet",
            "executor.address (--dist-init-addr) HOST:PORT of host 0, the same on every host",
        )
    host, _, port = (options.address or "127.0.0.1:0").rpartition(":")
    per = plan.ranks // hosts
    return Site(
        options.host_rank,
        hosts,
        per,
        per,
        host.strip("[]"),
        int(port),
        serves=options.host_rank == 0,
    )


def _launched(plan: EnginePlan, environment: Mapping[str, str]) -> Site:
    rank = int(environment["RANK"])
    world = int(environment["WORLD_SIZE"])
    if world != plan.ranks:
        raise _refused(
            "parallel",
            f"torchrun started {world} processes, the plan has {plan.ranks} ranks",
            f"--nnodes x --nproc-per-node of torchrun = {plan.ranks}, or parallel sizes for {world} ranks",
        )
    held = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Site(
        rank,
        world,
        1,
        int(environment["LOCAL_WORLD_SIZE"]),
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        serves=rank == 0 and not held,
        prefix=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _refused(field: str, reason: str, fix: str) -> PlanRefused:
    return PlanRefused([Refusal("torchrun", field, reason, fix)])
