"""Torch profiles that requests start and stop, written as Chrome traces into one directory.

The directory is ``GLOWPLUG_PROFILE_DIR`` or ``SGLANG_TORCH_PROFILER_DIR`` (debug switches), else
``./profiles``. A request gives a label, never a path. A trace shows the phases of a step by name.
Their methods are wrapped only while a profile runs, so the names cost nothing otherwise.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from glowplug.core.engine.runner import Runner
from glowplug.core.errors import RequestError
from glowplug.core.protocols import Scheduler

LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}")  #: permitted labels of a profile
Named = tuple[object, str, str]  #: object, method, its name in a trace


def profile_folder() -> Path:
    """Return the directory into which this process writes traces."""
    named = os.environ.get("GLOWPLUG_PROFILE_DIR") or os.environ.get("SGLANG_TORCH_PROFILER_DIR")
    return Path(named or "profiles")


def step_phases(scheduler: Scheduler, runner: Runner) -> list[Named]:
    """Return the methods that run a step's phases, with each phase's name in a trace.

    The order is that of a step, from the scheduler's choice to the commit.
    """
    return [
        (scheduler, "next_batch", "schedule"),
        (runner, "launch", "launch"),
        (runner, "_complete", "inputs"),
        (runner.graphs, "fill", "graph inputs"),
        (runner.sampler, "plan_step", "plan sampling"),
        (runner.attention, "plan_step", "plan attention"),
        (runner, "step", "step"),
        (runner.speculative, "draft", "draft"),
        (runner, "_forward", "forward"),
        (runner.step_logits, "of", "logits"),
        (runner.speculative, "accept", "accept"),
        (runner.sampler, "sample", "sample"),
        (runner, "_to_host", "results to host"),
        (scheduler, "commit", "commit"),
    ]


class Profiler:
    """One rank's profiler. ``start`` and ``stop`` are Control handlers.

    Args:
        rank: the rank.
        device: torch device of the rank.
        named: (object, method name, name in the trace) of the methods to show; the last one ends a
            step.
    """

    def __init__(self, rank: int, device: str, named: Sequence[Named] = ()) -> None:
        self.rank = rank
        self._cuda = device.startswith("cuda")
        self._active: Any = None
        self._label = ""
        self._steps_left = 0
        self._written = ""
        self._named = tuple(named)
        self._hidden = list[tuple[object, str]]()

    def start(self, args: dict[str, Any]) -> dict[str, Any]:
        """Start a trace, which ends after ``num_steps`` steps (if ``args`` has it) or at ``stop``.

        Raises:
            RequestError: a trace is running already, or the label has other characters than
                letters, digits, "-" and "_".
        """
        label = str(args.get("label") or "trace")
        if not LABEL.fullmatch(label):
            raise RequestError(
                "a profile label has 1 to 64 letters, digits, '-' or '_'", param="label"
            )
        if self._active is not None:
            raise RequestError("a profile is already running")
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._label = label
        self._steps_left = int(args.get("num_steps") or 0)
        self._written = ""
        self._active = torch.profiler.profile(activities=kinds)
        self._name_phases()
        self._active.start()
        return {}

    def stop(self, args: dict[str, Any]) -> dict[str, Any]:
        """End the trace, write it, and return the file's name.

        If the trace has already ended after its ``num_steps`` steps, return the name of its file.
        """
        if self._active is None and not self._written:
            raise RequestError("no profile is running")
        if self._active is not None:
            self._finish()
        written = self._written
        self._written = ""
        return {"file": written}

    def _finish(self) -> None:
        active = self._active
        self._active = None
        active.stop()
        for owner, method in self._hidden:
            delattr(owner, method)
        self._hidden.clear()
        folder = profile_folder()
        name = f"{self._label}-rank{self.rank}-{int(time.time())}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            active.export_chrome_trace(str(folder / name))
        except OSError as error:
            raise RequestError(f"the trace could not be written: {error.strerror}") from error
        self._written = name

    def _name_phases(self) -> None:
        """Wrap the methods of a step's phases in profiler ranges, so that a trace names the phases.

        The wrappers are attributes of the instances and so take precedence over the class's
        methods; deleting them restores the methods.
        """
        for owner, method, name in self._named:
            if hasattr(owner, "__dict__") and method not in vars(owner):
                shown = ranged(getattr(owner, method), name)
                last = owner is self._named[-1][0] and method == self._named[-1][1]
                setattr(owner, method, self._counted(shown) if last and self._steps_left else shown)
                self._hidden.append((owner, method))

    def _counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``work`` wrapped so that its ``num_steps``-th call ends the trace."""

        def run(*args: Any, **kwargs: Any) -> Any:
            result = work(*args, **kwargs)
            self._steps_left -= 1
            if not self._steps_left:
                self._end_quietly()
            return result

        return run

    def _end_quietly(self) -> None:
        """End the trace; if it cannot be written, log the error instead of raising.

        NOTE: no request waits for the reply here, and a trace that cannot be written must not end
        the engine.
        """
        try:
            self._finish()
        except RequestError as error:
            logging.getLogger("glowplug").warning("%s", error)


def ranged(work: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``work`` wrapped in a profiler range ``name``."""

    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return work(*args, **kwargs)

    return run
