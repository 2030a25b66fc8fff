"""Runtime of the Ray executor: starts one actor per rank and polls all actors from one thread.

Ray does the placement, the scheduling and the restarts of hosts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from glowplug.core.errors import EngineDead, EngineStopped, PlanRefused, Refusal
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.step.messages import decode_outbound
from glowplug.plugins.executors.ranks.failure_cause import (
    LOADED,
    QUIET,
    FailureKind,
    Watch,
    first_cause,
    host_limit,
    settled,
)
from glowplug.plugins.executors.ranks.host_identity import differences, identity
from glowplug.plugins.executors.ranks.local import GRACE, for_front
from glowplug.plugins.executors.ranks.start_watch import StartWatch, collective_limit

if TYPE_CHECKING:
    from glowplug.plugins.executors.ray_executor import RayOptions

POLL = 0.5  #: seconds that a poll waits for a frame of an actor
PLACE = 60.0  #: seconds that Ray may take to place the ranks, or to answer


class RayExecutor:
    """The ``Executor`` that runs each rank as a Ray actor.

    The caller's process is the driver of Ray. It may run on any host of the cluster.
    """

    leads = True

    def __init__(self, options: RayOptions, plan: EnginePlan, worker: Worker | None) -> None:
        self.options = options
        timeout = collective_limit(plan)
        self._limit = (
            options.watchdog if plan.hosts == 1 else min(options.watchdog, host_limit(timeout))
        )
        self._watch = Watch(range(plan.ranks), options.watchdog)
        self._frames: SimpleQueue[bytes] = SimpleQueue()
        self._actors: list[Any] = []
        self._group: Any = None
        self._store: Any = None
        self._own = False
        self._dead: EngineDead | None = None
        self._ended = threading.Event()
        self._poller: threading.Thread | None = None
        self._where = ""  # the hosts of the ranks, for messages
        self.pids: list[int] = []

    @property
    def progress(self) -> dict[int, str]:
        """The phase of each rank, with its completed share while it starts: "weights 41%"."""
        return self._watch.progress

    # ---- start -----------------------------------------------------------------------------------

    def start(self, plan: EnginePlan) -> None:
        """Create the actors, compare their hosts with this one, and wait until the ranks are ready.

        Raises:
            PlanRefused: Ray cannot be reached or cannot place the ranks, or a host has other
                versions, plugins or model files; nothing has been loaded then.
            EngineDead: a rank failed or is not ready in time.
        """
        self._connect(plan)
        self._place(plan)
        self._compare(plan)
        rendezvous = self._meeting() if plan.ranks > 1 else ""
        self._watch = Watch(self._watch.ranks, self._watch.limit)
        for actor in self._actors:
            actor.start.remote(plan.to_json(), self.options.threads, rendezvous)
        self._poller = threading.Thread(target=self._poll_forever, daemon=True, name="glowplug-ray")
        self._poller.start()
        start = StartWatch(collective_limit(plan), self.options.start_timeout)
        while any(phase not in LOADED for phase in self._watch.phases.values()):
            self._ended.wait(POLL / 5)
            if self._dead is not None:
                raise self._dead
            reason = start.look(self._watch.progress, self._watch.calls)
            if reason is not None:
                raise EngineDead(reason)
        # NOTE: the shorter limit applies only from here on, because heartbeats may be late while
        # ranks import and load.
        self._watch.limit = self._limit

    def _connect(self, plan: EnginePlan) -> None:
        import ray

        if ray.is_initialized():
            return
        cards = {"num_gpus": plan.ranks} if plan.device != "cpu" else {}
        here: dict[str, Any] = {"num_cpus": plan.ranks, "include_dashboard": False, **cards}
        try:
            ray.init(
                address=self.options.address or "local",
                logging_level=logging.WARNING,
                log_to_driver=False,
                **({} if self.options.address else here),
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise PlanRefused(
                [
                    Refusal(
                        "ray",
                        "executor.address",
                        f"Ray cannot be reached: {_one_line(error)}",
                        "ray start --head on one host, --address on the others, or leave address "
                        "out",
                    )
                ]
            ) from error
        self._own = True

    def _place(self, plan: EnginePlan) -> None:
        """Create one actor per rank.

        Each host has one Ray bundle, so that its ranks are consecutive.

        Raises:
            PlanRefused: Ray has not enough resources.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from glowplug.plugins.executors.ray_actor import RankActor

        per = plan.ranks // plan.hosts
        cards = int(plan.device != "cpu")
        bundle = {"CPU": per, **({"GPU": per} if cards else {})}
        self._group = placement_group(
            [bundle] * plan.hosts, "STRICT_SPREAD" if plan.hosts > 1 else "STRICT_PACK"
        )
        if not self._group.wait(PLACE):
            raise PlanRefused(
                [
                    Refusal(
                        "ray",
                        "executor.hosts",
                        f"Ray cannot place {plan.hosts} x {bundle}; available: "
                        f"{ray.available_resources()}",
                        "more hosts in the cluster, or fewer ranks",
                    )
                ]
            )
        # NOTE: ranks choose their device by number, so Ray must not hide the host's other devices
        # from them.
        environment = (
            {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}} if cards else None
        )
        remote = ray.remote(RankActor)
        for rank in range(plan.ranks):
            place = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank // per
            )
            self._actors.append(
                remote.options(
                    num_cpus=1,
                    num_gpus=cards,
                    max_restarts=0,
                    max_concurrency=8,
                    scheduling_strategy=place,
                    runtime_env=environment,
                ).remote(rank, self._limit)
            )

    def _compare(self, plan: EnginePlan) -> None:
        """Check that every actor's host has the versions, plugins and files of this process.

        Raises:
            PlanRefused: a host differs.
            EngineDead: an actor could not start.
        """
        import ray
        from ray.exceptions import RayError

        data = plan.to_json()
        try:
            found = ray.get([actor.identity.remote(data) for actor in self._actors], timeout=PLACE)
            places = ray.get([actor.place.remote() for actor in self._actors], timeout=PLACE)
        except RayError as error:
            raise EngineDead(
                f"a rank's actor could not start in phase spawn: {_one_line(error)}"
            ) from error
        self.pids = [pid for _, pid in places]
        if plan.hosts > 1:
            self._where = "; " + ", ".join(
                f"rank {rank} is on {host}" for rank, (host, _) in enumerate(places)
            )
        names = ["the driver", *(f"rank {rank} on {host}" for rank, (host, _) in enumerate(places))]
        refusals = differences([identity(plan), *found], names)
        if refusals:
            raise PlanRefused(refusals, "these hosts")

    def _meeting(self) -> str:
        """Start the rendezvous store in this process and return its URL.

        The store listens on the address of this host in the cluster.
        """
        import ray

        from glowplug.plugins.executors.ranks.host_link import hold_store

        self._store = hold_store(ray.util.get_node_ip_address(), 0, PLACE)
        return f"tcp://{self._store.host}:{self._store.port}/ray?held"

    # ---- serve -----------------------------------------------------------------------------------

    def submit(self, data: bytes) -> None:
        """Send a frame to rank 0, which broadcasts it."""
        if self._dead is None:
            self._actors[0].submit.remote(data)

    def outputs(self, timeout: float | None) -> bytes | None:
        try:
            frame = self._frames.get(timeout=timeout)
            if frame:
                return frame
        except Empty:
            pass
        if self._dead is not None:
            raise self._dead
        return None

    def _poll_forever(self) -> None:
        """Collect the frames of every actor until an actor fails or all have ended."""
        try:
            for _ in self._rounds():
                self._watch.look()
                if self._watch.all_ended():
                    self._dead = self._dead or EngineStopped("the engine was stopped")
                    return
                if self._watch.troubles:
                    break
            self._settle()
        except Exception as error:  # NOTE: any error that Ray raises when it goes down
            self._dead = self._dead or EngineDead(f"Ray has failed: {_one_line(error)}")
        finally:
            self._ended.set()
            self._frames.put(b"")  # wakes a waiting ``outputs``

    def _rounds(self) -> Iterator[None]:
        """Poll the actors in rounds and yield after each one, until every actor has gone."""
        import ray

        pending = {actor.poll.remote(POLL): rank for rank, actor in enumerate(self._actors)}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=POLL)
            for ref in ready:
                rank = pending.pop(ref)
                if self._take(rank, ref):
                    pending[self._actors[rank].poll.remote(POLL)] = rank
            yield

    def _take(self, rank: int, ref: Any) -> bool:
        """Store the frames that a poll of ``rank`` returned; return False if its actor has gone."""
        import ray
        from ray.exceptions import RayError

        try:
            frames = msgspec.msgpack.decode(ray.get(ref), type=list[bytes])
        except RayError as error:
            self._watch.ended(rank, _one_line(error))
            return False
        for frame in frames:
            messages = decode_outbound(frame)
            self._watch.received(rank, messages)
            if any(for_front(message) for message in messages):
                self._frames.put(frame)
        return True

    def _settle(self) -> None:
        """Read reports for a moment after a failure, then record its first cause as the reason.

        The wait is longer while the only failures reported are lost connections to other ranks.
        """
        started = time.monotonic()
        for _ in self._rounds():
            waited = time.monotonic() - started
            kind = first_cause(self._watch.troubles).kind
            if kind >= FailureKind.STUCK and waited > QUIET:
                self._watch.look(QUIET)
                kind = first_cause(self._watch.troubles).kind
            if settled(kind, waited):
                break
        cause = first_cause(self._watch.troubles)
        self._dead = self._dead or EngineDead(str(replace(cause, text=cause.text + self._where)))

    # ---- end -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the ranks, and Ray if this executor started it. Idempotent.

        Ranks that have not left their loop after GRACE seconds are killed.
        """
        orderly = self._dead is None and self._poller is not None
        if orderly:
            for actor in self._actors:
                actor.close.remote()
            self._ended.wait(GRACE)
        self._dead = self._dead or EngineStopped("the engine was stopped")
        self._release()

    def _release(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        actors = self._actors
        self._actors = []
        with contextlib.suppress(Exception):  # NOTE: Ray itself may have gone
            for actor in actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._group = self._store = None
        if self._own:
            self._own = False
            ray.shutdown()


def _one_line(error: BaseException) -> str:
    """Return an error as one line of at most 400 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"[:400]
