"""The rank processes of ``bench kernels --collectives``, and what they measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from glowplug.core.errors import EngineDead, GlowplugError
from glowplug.core.plugin.offers import GraphOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.step.messages import Control, Reply, decode_outbound, encode
from glowplug.entrypoints.front.open_engine import make_executor

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan


class UnusableError(GlowplugError):
    """The reason why a provider cannot exchange on this machine."""


@dataclass(frozen=True)
class MeasuredProvider:
    """One provider to measure.

    Attributes:
        label: the provider's name in the tables.
        overrides: changed sections of the configuration.
        exchanges: True: the exchange of experts' tokens is measured; False: sums and gathers are.
    """

    label: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    exchanges: bool = False


#: function that returns a rank's loop; see ``core.startup.build_rank.build_rank``
Build = Callable[..., Any]


class RankProcesses:
    """Rank processes that stay from one plan to the next; a context manager that ends them.

    The executor of the first plan starts them. After a failure they are started anew.

    Args:
        plugins: the loaded plugins.
        build: function that returns a rank's loop.
        action: action of the messages to the ranks.

    Attributes:
        starts: times that the processes were started.
    """

    def __init__(self, plugins: PluginSet, build: Build, action: str) -> None:
        self.starts = 0
        self._plugins = plugins
        self._build = build
        self._action = action
        self._executor: Any = None
        self._messages = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, plan: EnginePlan, args: Mapping[str, Any]) -> Reply:
        """Send the ranks a plan with further arguments, and return rank 0's reply.

        Raises:
            EngineDead: a rank has failed.
        """
        try:
            return self._send(plan, args)
        except EngineDead:
            self.close()
            raise

    def _send(self, plan: EnginePlan, args: Mapping[str, Any]) -> Reply:
        if self._executor is None:
            self._executor = make_executor(plan, self._plugins)
            self._executor.start(plan, self._build)
            self.starts += 1
        self._messages += 1
        given = {**args, "plan": plan.to_json().decode()}
        self._executor.submit(encode([Control(self._messages, self._action, given)]))
        while True:
            frame = self._executor.outputs(None)  # None after a heartbeat
            for message in decode_outbound(frame) if frame else []:
                if isinstance(message, Reply) and message.id == self._messages:
                    return message

    def close(self) -> None:
        """Stop the ranks, if they run."""
        if self._executor is not None:
            self._executor.stop()
        self._executor = None


class Ranks(RankProcesses):
    """The rank processes that measure exchanges."""

    def __init__(self, plugins: PluginSet) -> None:
        from glowplug.entrypoints.bench.ranks import measured_rank  # imports torch

        super().__init__(plugins, measured_rank.build, "measure")

    def measure(
        self, provider: MeasuredProvider, plan: EnginePlan, work: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Measure a plan on all ranks and return the rows.

        Raises:
            EngineDead: a rank has failed.
            UnusableError: the plan's components cannot exchange on this machine.
            GlowplugError: a result is wrong.
        """
        reply = self.send(plan, {**work, "captured": captures(plan, self._plugins)})
        if not reply.ok:
            raise (GlowplugError if reply.data["wrong"] else UnusableError)(reply.error)
        layout = {"mesh": plan.mesh} if provider.exchanges else {}
        return [{"provider": provider.label, **row, **layout} for row in reply.data["rows"]]


def captures(plan: EnginePlan, plugins: PluginSet) -> bool:
    """Return whether the plan's steps are captured in graphs."""
    found = plugins.find("graphs", plan.choice("graphs").name)
    offers = found.component.offers if found is not None else None
    return isinstance(offers, GraphOffers) and bool(offers.captures)
