"""The ranks that this process supervises, and the address where the processes meet.

Both come from the options, or from torchrun's environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.plan.plan import EnginePlan
from glowplug.plugins.executors.torchrun import TorchrunOptions

#: variable that torchrun sets in every process it starts
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Site:
    """One host of the plan: a process that supervises the ranks of this host.

    Under torchrun every rank has such a process, and each process counts as a host in the
    messages between hosts.

    Attributes:
        index: number of this host (under torchrun, of the process); host 0 runs the front end.
        count: number of hosts (under torchrun, of processes).
        per: number of ranks that each process supervises; their numbers are consecutive.
        per_host: number of ranks on each machine.
        host: address of the rendezvous store, over which the hosts find each other.
        port: port of the store.
        serves: this process runs the store; otherwise host 0 or torchrun's agent does.
        prefix: prefix of the store's keys, which differs for each restart by torchrun.
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
        """Return the name of host ``index`` for messages, such as "host 1 (ranks 2, 3)"."""
        first = index * self.per
        ranks = ", ".join(map(str, range(first, first + self.per)))
        return f"host {first // self.per_host} (rank{'s' if self.per > 1 else ''} {ranks})"

    @property
    def rendezvous(self) -> str:
        """URL at which the ranks find the store; "held" in it: the store runs already."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.prefix}?held"


def find_site(
    options: TorchrunOptions, plan: EnginePlan, environment: Mapping[str, str] = os.environ
) -> Site:
    """Return the host for which this process runs, from the options or torchrun's variables.

    Args:
        options: options of the executor.
        plan: the engine plan.
        environment: environment variables, torchrun's among them if it started this process.

    Raises:
        PlanRefused: the environment contradicts the plan, or there are several hosts and no
            address where they meet.
    """
    if TORCHRUN_VARIABLE in environment:
        return _launched(plan, environment)
    hosts = plan.hosts
    if options.address is None and hosts > 1:
        raise _refused(
            "executor.address",
            f"the plan has {hosts} hosts, and the address where they meet is missing",
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
    """Return the host description of a process that torchrun started for one rank."""
    rank = int(environment["RANK"])
    world = int(environment["WORLD_SIZE"])
    if world != plan.ranks:
        raise _refused(
            "parallel",
            f"torchrun started {world} processes, the plan has {plan.ranks} ranks",
            f"--nnodes x --nproc-per-node of torchrun = {plan.ranks}, or parallel sizes for "
            f"{world} ranks",
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
