"""The process of one rank of ``bench kernels --collectives``: a loop that measures exchanges.

The executor starts it in place of an engine. Each message of the front end names a plan; all ranks
then build the plan's components over a rendezvous of their own, and rank 0 replies with the rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from glowplug.core.errors import GlowplugError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.startup.components import build_component, build_context, make_worker
from glowplug.core.startup.phases import Note, Report
from glowplug.core.step.messages import (
    Control,
    Outbound,
    Reply,
    Turn,
    decode_inbound,
    decode_turn,
    encode_turn,
)
from glowplug.entrypoints.bench.ranks.expert_exchanges import ExpertExchanges
from glowplug.entrypoints.bench.ranks.operations import Operation, SumsAndGathers, axes_of
from glowplug.entrypoints.bench.ranks.timing import RankTimer


def build(
    plan: EnginePlan, rank: int, plugins: PluginSet, report: Report, rendezvous: str, note: Note
) -> MeasuredRank:
    """Return the loop of one rank; see ``core.startup.build_rank.build_rank``."""
    worker = make_worker(plan, rank, rendezvous)
    if worker.device != "cpu":
        torch.cuda.set_device(worker.device)
    collectives = build_component(plugins, plan.choice("collectives"), plan, worker)
    report("ready", 1, 1)
    return MeasuredRank(collectives, plugins, rank, rendezvous)


class MeasuredRank:
    """A rank's loop, with the attributes and methods that executors use of an ``Engine``.

    Args:
        collectives: collectives over which rank 0 passes messages on.
        plugins: the loaded plugins.
        rank: number of the rank.
        rendezvous: address at which the ranks of ``collectives`` met.
    """

    idle = True

    def __init__(self, collectives: Any, plugins: PluginSet, rank: int, rendezvous: str) -> None:
        self.collectives = collectives
        self.leads = rank == 0
        self._plugins = plugins
        self._rank = rank
        self._rendezvous = rendezvous
        # NOTE: a backend may name its groups by the address of an object, which must not be freed
        # while torch still has the group's name
        self._closed: list[Any] = []

    def turn(self, frames: Sequence[bytes] = (), stop: bool = False) -> list[Outbound] | None:
        """Receive messages and measure what they name; see ``Engine.turn``."""
        own = encode_turn(Turn(time.monotonic(), list(frames), stop)) if self.leads else None
        turn = decode_turn(self.collectives.broadcast_bytes(own))
        if turn.stop:
            return None
        messages = [one for frame in turn.frames for one in decode_inbound(frame)]
        replies = [self._reply(one) for one in messages if isinstance(one, Control)]
        return list(replies) if self.leads else []

    def close(self) -> None:
        self.collectives.close()

    def _reply(self, message: Control) -> Reply:
        """Measure the plan of a message, and reply with the rows or the reason why there are none.

        Every rank comes to the same reply, so that all of them go on to the next message.
        """
        plan = EnginePlan.from_json(message.args["plan"].encode())
        worker = make_worker(plan, self._rank, f"{self._rendezvous}-{message.id}")
        context = build_context(plan, self._plugins, worker)
        try:
            return Reply(message.id, True, {"rows": list(self._rows(context, plan, message.args))})
        except MeasurementError as error:
            return Reply(message.id, False, {"wrong": error.wrong}, str(error))
        finally:
            context.collectives.close()
            self._closed.append(context.collectives)

    def _rows(
        self, context: BuildContext, plan: EnginePlan, work: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield a row for each operation, once its result is known to be right.

        Raises:
            MeasurementError: another backend exchanges in place of the plan's, or a result is
                wrong.
        """
        replaced = getattr(context.collectives, "replaced", "")
        if replaced:
            raise MeasurementError(replaced)
        timer = RankTimer(self.collectives, context.worker.device, work["captured"])
        for operation in operations(context, plan, work):
            with torch.inference_mode():
                error = timer.slowest(operation.error())
            if error > operation.tolerance:
                raise MeasurementError(
                    f"wrong result: {operation.name} of {operation.bytes} bytes differs from the "
                    f"sum in float32 by {error:.2g} of its largest number",
                    wrong=True,
                )
            spent = timer.seconds(operation.run)
            check = getattr(context.collectives, "check", None)
            if check is not None:
                check()
            yield row(operation, spent, error) | {"captured": work["captured"]}


class MeasurementError(GlowplugError):
    """The reason why a backend is not measured, the same on every rank.

    Attributes:
        wrong: True: a result is wrong; False: the backend does not run on this machine.
    """

    def __init__(self, reason: str, wrong: bool = False) -> None:
        super().__init__(reason)
        self.wrong = wrong


def operations(
    context: BuildContext, plan: EnginePlan, work: dict[str, Any]
) -> Iterable[Operation]:
    """Return the operations to measure.

    Args:
        context: the rank's components.
        plan: their plan.
        work: "sizes": bytes of tensors; "tokens": tokens a rank of expert exchanges.
    """
    for axis in axes_of(plan, context.worker.rank) if work["sizes"] else []:
        yield from SumsAndGathers(context, plan, axis).operations(work["sizes"])
    if work["tokens"]:
        yield from ExpertExchanges(context, plan).operations(work["tokens"])


def row(operation: Operation, spent: float, error: float) -> dict[str, Any]:
    """Return the record of one measured operation; ``spent``: seconds of a call."""
    spent = max(spent, 1e-9)
    return {
        "operation": operation.name,
        "axis": operation.axis,
        "ranks": operation.ranks,
        "bytes": operation.bytes,
        "tokens": operation.tokens,
        "us": spent * 1e6,
        "gb_s": operation.traffic / spent / 1e9 if operation.traffic else None,
        "error": error,
    }
