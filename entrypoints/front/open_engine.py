"""Start of an engine from its plan, for the server and the offline engine."""

from __future__ import annotations

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Executor, Worker
from glowplug.core.startup.components import build_component


def make_executor(plan: EnginePlan, plugins: PluginSet) -> Executor:
    """Return the plan's executor, not yet started.

    Its attribute ``leads`` is true on the host that runs the front.
    """
    executor: Executor = build_component(plugins, plan.choice("executor"), plan, Worker())
    return executor


def start_executor(
    plan: EnginePlan, plugins: PluginSet, executor: Executor | None = None
) -> Executor:
    """Start the plan's executor, wait until every rank is ready and return the executor.

    Args:
        plan: the engine's plan.
        plugins: the plan's plugins.
        executor: the result of :func:`make_executor`; None: it is made here.

    Raises:
        PlanRefused: this host does not run the front.
    """
    plugins.call_each("plan_ready", plan=plan)
    executor = executor or make_executor(plan, plugins)
    if not executor.leads:
        raise PlanRefused(
            [
                Refusal(
                    "launch",
                    "executor.host_rank",
                    "the front of this engine runs on host 0",
                    "run glowplug serve with the same flags on the other hosts",
                )
            ]
        )
    return _started(executor, plan)


def _started(executor: Executor, plan: EnginePlan) -> Executor:
    """Start the executor and return it; stop it if the start fails."""
    try:
        executor.start(plan)
    except BaseException:
        executor.stop()
        raise
    return executor
