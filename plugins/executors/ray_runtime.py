"""Starts an actor a rank and polls them all from one thread. Placement, scheduling and restarts of
hosts are Ray's.
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
    Kind,
    Watch,
    first_cause,
    host_limit,
    not_ready,
    settled,
)
from glowplug.plugins.executors.ranks.host_identity import differences, identity
from glowplug.plugins.executors.ranks.local import GRACE, for_front

if TYPE_CHECKING:
    from glowplug.plugins.executors.ray_executor import RayOptions

POLL = 0.5  #: seconds an actor waits for something to send
PLACE = 60.0  #: seconds Ray may take to find room for the ranks


class RayExecutor:
    """``Executor`` over Ray actors. The caller's process is Ray's driver; it may be on any host of
    the cluster.
    """

    leads = True

    def __init__(self, options: RayOptions, plan: EnginePlan, worker: Worker | None) -> None:
        self.options = options
        timeout = float(plan.choice("collectives").options.get("timeout", 600.0))
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

    # ---- start -----------------------------------------------------------------------------------

    def start(self, plan: EnginePlan) -> None:
        """Place the actors, compare what they would load with our plan, load, and wait until every
        rank is ready.
        """
        deadline = time.monotonic() + self.options.start_timeout
        self._connect(plan)
        self._place(plan)
        self._compare(plan)
        rendezvous = self._meeting() if plan.ranks > 1 else ""
        self._watch = Watch(self._watch.ranks, self._watch.limit)
        for actor in self._actors:
            actor.start.remote(plan.to_json(), self.options.threads, rendezvous)
        self._poller = threading.Thread(target=self._poll_forever, daemon=True, name="glowplug-ray")
        self._poller.start()
        while slow := [rank for rank, phase in self._watch.phases.items() if phase not in LOADED]:
            self._ended.wait(POLL / 5)
            if self._dead is not None:
                raise self._dead
            if time.monotonic() > deadline:
                raise EngineDead(
                    not_ready(slow[0], self._watch.phase(slow[0]), self.options.start_timeout)
                )
        self._watch.limit = (
            self._limit
        )  # NOTE: while ranks import and load they may be kept from signs of life

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
                        f"no Ray answers: {_line(error)}",
                        "ray start --head on one host, --address on the others, or leave address out",
                    )
                ]
            ) from error
        self._own = True

    def _place(self, plan: EnginePlan) -> None:
        """One bundle a host, so that ranks of a host are neighbours."""
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
                        f"Ray has no room for {plan.hosts} x {bundle}: {ray.available_resources()}",
                        "more hosts in the cluster, or fewer ranks",
                    )
                ]
            )
        # NOTE: ranks choose their device by number, so Ray must not hide the others of the host
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
        import ray
        from ray.exceptions import RayError

        data = plan.to_json()
        try:
            found = ray.get([actor.identity.remote(data) for actor in self._actors], timeout=PLACE)
            places = ray.get([actor.place.remote() for actor in self._actors], timeout=PLACE)
        except RayError as error:
            raise EngineDead(
                f"a rank's actor could not start in phase spawn: {_line(error)}"
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
        """A store in this process, on the address by which the cluster knows this host."""
        import ray

        from glowplug.plugins.executors.ranks.host_link import hold_store

        self._store = hold_store(ray.util.get_node_ip_address(), 0, PLACE)
        return f"tcp://{self._store.host}:{self._store.port}/ray?held"

    # ---- serve -----------------------------------------------------------------------------------

    def submit(self, data: bytes) -> None:
        """To rank 0, which broadcasts."""
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
        """The poller's thread: frames out of every actor, until one fails or all are done."""
        try:
            for _ in self._rounds():
                self._watch.look()
                if self._watch.all_ended():
                    self._dead = self._dead or EngineStopped("the engine was stopped")
                    return
                if self._watch.troubles:
                    break
            self._settle()
        except Exception as error:  # NOTE: whatever Ray raises when it goes down under us
            self._dead = self._dead or EngineDead(f"Ray has failed: {_line(error)}")
        finally:
            self._ended.set()
            self._frames.put(b"")  # wakes whoever waits for one

    def _rounds(self) -> Iterator[None]:
        """Each look at the actors; ends when nobody is left to ask."""
        import ray

        asked = {actor.poll.remote(POLL): rank for rank, actor in enumerate(self._actors)}
        while asked:
            ready, _ = ray.wait(list(asked), num_returns=1, timeout=POLL)
            for ref in ready:
                rank = asked.pop(ref)
                if self._take(rank, ref):
                    asked[self._actors[rank].poll.remote(POLL)] = rank
            yield

    def _take(self, rank: int, ref: Any) -> bool:
        """The frames of one answer. False when the actor has gone."""
        import ray
        from ray.exceptions import RayError

        try:
            frames = msgspec.msgpack.decode(ray.get(ref), type=list[bytes])
        except RayError as error:
            self._watch.ended(rank, _line(error))
            return False
        for frame in frames:
            messages = decode_outbound(frame)
            self._watch.heard(rank, messages)
            if any(for_front(message) for message in messages):
                self._frames.put(frame)
        return True

    def _settle(self) -> None:
        """Reads on for a moment, longer when ranks have only lost peers; then the first cause is
        what we died of.
        """
        started = time.monotonic()
        for _ in self._rounds():
            waited = time.monotonic() - started
            kind = first_cause(self._watch.troubles).kind
            if kind == Kind.CONSEQUENCE and waited > QUIET:
                self._watch.look(QUIET)
                kind = first_cause(self._watch.troubles).kind
            if settled(kind, waited):
                break
        cause = first_cause(self._watch.troubles)
        self._dead = self._dead or EngineDead(str(replace(cause, text=cause.text + self._where)))

    # ---- end -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Idempotent. Ranks leave their loop within GRACE seconds or are killed; a Ray that we
        started ends too.
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
        with contextlib.suppress(Exception):  # NOTE: Ray itself may be what has gone
            for actor in actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._group = self._store = None
        if self._own:
            self._own = False
            ray.shutdown()


def _line(error: BaseException) -> str:
    """What happened, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"[:400]
