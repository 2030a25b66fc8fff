"""``glowplug serve`` on a host that does not run the front.

It supervises this host's ranks until the engine ends.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from types import FrameType

from glowplug.core.errors import EngineDead, EngineStopped, PlanRefused
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import ServerOptions
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Executor
from glowplug.entrypoints.cli import exit_codes

logger = logging.getLogger("glowplug.server")

SIGNAL_CHECK_SECONDS = 0.5  #: interval at which signals are checked
DRAIN_MARGIN_SECONDS = 10.0  #: time added to the drain limit of host 0


def follow(plan: EnginePlan, plugins: PluginSet, executor: Executor) -> int:
    """Run the ranks of a host that runs no front (not host 0) until the engine ends.

    After a signal, host 0 is expected to drain and to end the engine on every host. A second
    signal exits at once.

    Returns:
        0 if the engine was stopped, 1 if it failed.

    Raises:
        PlanRefused: hosts have different plans.
    """
    plugins.call_each("plan_ready", plan=plan)
    try:
        executor.start(plan)
        logger.info("this host's ranks are ready; host 0 answers requests")
        _supervise(
            executor, ServerOptions.model_validate(plan.config.get("server", {})).drain_timeout
        )
    except EngineStopped:
        logger.info("the engine has ended")
        return exit_codes.OK
    except PlanRefused:
        raise
    except EngineDead as error:
        logger.error("the engine has stopped: %s", error)
        return exit_codes.FAILED
    finally:
        executor.stop()
    return exit_codes.OK


def _supervise(executor: Executor, drain: float) -> None:
    """Wait for the end of the engine, which the executor reports by raising an exception.

    After a signal, host 0 is given the drain limit and DRAIN_MARGIN_SECONDS to end the engine.
    If it does not, the function returns without an exception.

    Args:
        executor: the started executor of this host.
        drain: drain limit in seconds.
    """
    signals: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        if signals:
            os._exit(exit_codes.SECOND_SIGNAL)
        signals.append(time.monotonic())
        logger.info("waiting for host 0 to end the engine; a second signal exits at once")

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not signals or time.monotonic() - signals[0] < drain + DRAIN_MARGIN_SECONDS:
            executor.outputs(SIGNAL_CHECK_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
