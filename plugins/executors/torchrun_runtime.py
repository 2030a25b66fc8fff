"""Runtime of the torchrun executor: supervises this host's ranks.

Under torchrun each process supervises one rank and counts as a host here. The hosts agree through
the rendezvous store on the plan, on the start, and on the reason of the end.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from glowplug.core.errors import EngineDead, EngineStopped, PlanRefused
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.plugins.executors.ranks.failure_cause import (
    LOADED,
    QUIET,
    SETTLE,
    FailureKind,
    Trouble,
    first_cause,
    host_limit,
    settled,
)
from glowplug.plugins.executors.ranks.host import find_site
from glowplug.plugins.executors.ranks.host_identity import differences, identity
from glowplug.plugins.executors.ranks.local import GRACE, LocalRanks
from glowplug.plugins.executors.ranks.reach import await_first_host
from glowplug.plugins.executors.ranks.start_watch import StartWatch, collective_limit

if TYPE_CHECKING:
    from glowplug.plugins.executors.ranks.host_link import HostLink
    from glowplug.plugins.executors.torchrun import TorchrunOptions

NOTICE_SECONDS = 2.0  #: seconds to report to the other hosts why this one ends
READ_SECONDS = 0.5  #: longest wait of one read, so the other hosts are checked at least this often


class TorchrunExecutor:
    """The ``Executor`` on each host of an engine whose hosts are started separately.

    On host 0 the executor serves the front end. On other hosts it only supervises the ranks
    (``leads`` is False).
    """

    def __init__(self, options: TorchrunOptions, plan: EnginePlan, worker: Worker | None) -> None:
        self.options = options
        self._site = find_site(options, plan)
        self._timeout = collective_limit(plan)
        self._ranks = LocalRanks(self._site.ranks, options.watchdog, options.threads)
        self._frames: deque[bytes] = deque()
        self._dead: EngineDead | None = None
        self._link: HostLink | None = None

    @property
    def leads(self) -> bool:
        return self._site.index == 0

    @property
    def pids(self) -> list[int]:
        return self._ranks.pids

    # ---- start -----------------------------------------------------------------------------------

    def start(self, plan: EnginePlan) -> None:
        """Connect the hosts, compare their plans, spawn the ranks, and wait until they are ready.

        Host 0 waits for every rank, other hosts for their own ranks.

        Raises:
            PlanRefused: the hosts' plans differ; it is raised on every host, and nothing has been
                loaded.
            EngineDead: a rank or host failed or is not ready in time.
        """
        start = StartWatch(self._timeout, self.options.start_timeout)
        link = self._meet(plan, start.meeting_limit)
        self._ranks.spawn(plan, self._site.rendezvous)
        self._link = link
        link.start()
        while self._loading(plan.ranks):
            self._read(SETTLE)
            reason = start.look(self.progress, self._ranks.watch.calls)
            if reason is not None:
                self._die(Trouble(FailureKind.FAILED, reason))

    def _meet(self, plan: EnginePlan, limit: float) -> HostLink:
        """Connect the hosts within ``limit`` seconds, compare their plans, and return the link.

        Raises:
            PlanRefused: the hosts' plans differ.
            EngineDead: a host has not arrived in time.
        """
        from glowplug.plugins.executors.ranks.host_link import HostLink

        deadline = time.monotonic() + limit
        if not self._site.serves:
            await_first_host(self._site, limit)
        link = HostLink(self._site, host_limit(self._timeout), lambda: self._ranks.watch.states)
        self._site = link.open(max(1.0, deadline - time.monotonic()))
        found = link.meet(identity(plan), deadline - time.monotonic())
        refusals = differences(found, [self._site.name(one) for one in range(self._site.count)])
        if refusals:
            raise PlanRefused(refusals, "these hosts")
        return link

    @property
    def progress(self) -> dict[int, str]:
        """The phase of each rank, with its completed share while it starts; {} before they meet."""
        if self._link is None:
            return {}
        return {**self._link.phases(), **self._ranks.watch.progress}

    def _loading(self, ranks: int) -> bool:
        """Return whether a rank still loads: on host 0 any of all ``ranks``, else of its own."""
        phases = self.progress
        return any(
            phases.get(rank) not in LOADED
            for rank in (range(ranks) if self.leads else self._site.ranks)
        )

    # ---- serve -----------------------------------------------------------------------------------

    def submit(self, data: bytes) -> None:
        """Send a frame to rank 0, which broadcasts it. For host 0 only."""
        self._ranks.send(0, data)

    def outputs(self, timeout: float | None) -> bytes | None:
        if self._dead is not None:
            raise self._dead
        if not self._frames:
            self._read(timeout)
        return self._frames.popleft() if self._frames else None

    def _read(self, timeout: float | None) -> None:
        """Receive frames from this host's ranks and check the ranks and the other hosts.

        On host 0 the frames are kept for ``outputs``; other hosts forward them to host 0.

        Raises:
            EngineDead: a rank or host has failed, or the engine was stopped.
        """
        link = self._link
        assert link is not None
        timeout = READ_SECONDS if timeout is None else min(timeout, READ_SECONDS)
        frames = self._ranks.receive(timeout, also=[link.wake] if self.leads else [])
        if self.leads:
            self._frames.extend([*frames, *link.take()])
        else:
            for frame in frames:
                link.forward(frame)
        self._ranks.watch.look()
        if self._dead is not None:  # stopped meanwhile, by another thread
            raise self._dead
        if self._ranks.watch.all_ended() or link.leaving():
            self._end(EngineStopped("the engine was stopped"), GRACE)
        if self._ranks.watch.troubles or link.look():
            self._die(self._settle(link))

    def _settle(self, link: HostLink) -> Trouble:
        """Read reports for a moment after a failure, then return its first cause.

        The wait is longer while the only failures reported are lost connections to other ranks.
        """
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            troubles = [*self._ranks.watch.troubles, *link.look()]
            kind = first_cause(troubles).kind
            if kind >= FailureKind.STUCK and waited > QUIET:
                self._ranks.watch.look(QUIET)
                troubles = [*self._ranks.watch.troubles, *link.look_at_ranks(QUIET)]
                kind = first_cause(troubles).kind
            if settled(kind, waited):
                return first_cause(troubles)
            if self._ranks.watch.all_ended() or link.leaving():
                self._end(EngineStopped("the engine was stopped"), GRACE)
            self._ranks.receive(SETTLE / 10)

    def _die(self, trouble: Trouble) -> None:
        if self._link is not None:
            self._link.report(trouble, NOTICE_SECONDS)
        self._end(EngineDead(str(trouble)), grace=0.0)

    def _end(self, error: EngineDead, grace: float) -> None:
        self._dead = error
        self._ranks.end(grace)
        if self._link is not None:
            self._link.close()
        raise error

    def stop(self) -> None:
        """Stop this host's ranks.

        On host 0 this call ends the engine on all hosts in an orderly way. On another host the
        engine fails, because one of its hosts has left.
        """
        if self._dead is not None:
            return
        self._dead = EngineStopped("the engine was stopped")
        if self._link is not None:
            reason = None if self.leads else Trouble(FailureKind.ENDED, "was stopped")
            self._link.report(reason, NOTICE_SECONDS)
        self._ranks.end(GRACE)
        if self._link is not None:
            self._link.close()
