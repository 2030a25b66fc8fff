"""From a plan to a running engine. Shared by the server and the offline class."""

from __future__ import annotations

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Executor, Worker
from glowplug.core.startup.components import build_component


def make_executor(plan: EnginePlan, plugins: PluginSet) -> Executor:
    """The plan's executor, not yet started. Ask ``leads`` whether the front belongs here."""
    executor: Executor = build_component(plugins, plan.choice("executor"), plan, Worker())
    return executor


def start_executor(
    plan: EnginePlan, plugins: PluginSet, executor: Executor | None = None
) -> Executor:
    """The plan's executor (or ``executor``, made before), started: every rank is ready when this
    returns.
    """
    plugins.call_each("plan_ready", plan=plan)
    executor = executor or make_executor(plan, plugins)
    if not executor.leads:
        raise PlanRefused(
            [
                Refusal(
                    "launch",
                    "executor.host_rank",
                    "the front of this engine belongs to host 0",
                    "glowplug serve with the same flags on the other hosts",
                )
            ]
        )
    return _started(executor, plan)


def _started(executor: Executor, plan: EnginePlan) -> Executor:
    try:
        executor.start(plan)
    except BaseException:
        executor.stop()
        raise
    return executor
