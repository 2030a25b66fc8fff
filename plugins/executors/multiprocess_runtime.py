"""Runtime of the multiprocess executor: spawns the ranks of one host and passes message frames.

This process does not import torch.
"""

from __future__ import annotations

import tempfile
from collections import deque
from typing import TYPE_CHECKING

from glowplug.core.errors import EngineDead, EngineStopped
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.plugins.executors.ranks.failure_cause import LOADED, SETTLE
from glowplug.plugins.executors.ranks.local import GRACE, LocalRanks
from glowplug.plugins.executors.ranks.process import BuildLoop
from glowplug.plugins.executors.ranks.start_watch import StartWatch, collective_limit

if TYPE_CHECKING:
    from glowplug.plugins.executors.multiprocess import MultiprocessOptions


class MultiprocessExecutor:
    """The ``Executor`` that runs each rank in a spawned process of this host.

    ``submit`` and ``outputs`` may be called from different threads.
    """

    leads = True

    def __init__(
        self, options: MultiprocessOptions, plan: EnginePlan, worker: Worker | None
    ) -> None:
        self.options = options
        self._ranks = LocalRanks(range(plan.ranks), options.watchdog, options.threads)
        self._frames: deque[bytes] = deque()
        self._dead: EngineDead | None = None
        # the folder of the rendezvous file of several ranks
        self._meeting: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        return self._ranks.pids

    @property
    def progress(self) -> dict[int, str]:
        """The phase of each rank, with its completed share while it starts: "weights 41%"."""
        return self._ranks.watch.progress

    def start(self, plan: EnginePlan, build: BuildLoop | None = None) -> None:
        """Spawn the ranks and wait until every one is ready.

        Args:
            plan: the plan.
            build: function that builds each rank's loop, for ranks that run no engine; see
                ``rank_main``.

        Raises:
            EngineDead: a rank failed or is not ready in time; the message names rank, phase and
                reason.
        """
        rendezvous = ""
        if plan.ranks > 1:
            self._meeting = tempfile.TemporaryDirectory(prefix="glowplug-")
            rendezvous = f"file://{self._meeting.name}/ranks"
        start = StartWatch(collective_limit(plan), self.options.start_timeout)
        self._ranks.spawn(plan, rendezvous, build)
        while any(phase not in LOADED for phase in self._ranks.watch.phases.values()):
            self._read(SETTLE)
            reason = start.look(self._ranks.watch.progress, self._ranks.watch.calls)
            if reason is not None:
                self._die(EngineDead(reason))

    def submit(self, data: bytes) -> None:
        """Send a frame to rank 0, which broadcasts it."""
        self._ranks.send(0, data)

    def outputs(self, timeout: float | None) -> bytes | None:
        if self._dead is not None:
            raise self._dead
        if not self._frames:
            self._read(timeout)
        return self._frames.popleft() if self._frames else None

    def _read(self, timeout: float | None) -> None:
        """Receive frames from the ranks and check that they are alive.

        Raises:
            EngineDead: a rank has failed, or the engine was stopped.
        """
        self._frames.extend(self._ranks.receive(timeout))
        self._ranks.watch.look()
        if self._dead is not None:  # stopped meanwhile, by another thread
            raise self._dead
        if self._ranks.watch.troubles:
            self._die(EngineDead(str(self._ranks.settle())))

    def _die(self, error: EngineDead) -> None:
        self._dead = error
        self._end(grace=0.0)
        raise error

    def stop(self) -> None:
        if self._dead is None:
            self._dead = EngineStopped("the engine was stopped")
            self._end(GRACE)

    def _end(self, grace: float) -> None:
        self._ranks.end(grace)
        if self._meeting is not None:
            self._meeting.cleanup()
