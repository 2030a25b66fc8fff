"""A torch profiler that requests can switch on and off; writes Chrome traces under one directory.

The directory is ``GLOWPLUG_PROFILE_DIR`` or ``SGLANG_TORCH_PROFILER_DIR`` (debug switches), else
``./profiles``. A request names a label, never a path. While a profile runs, the phases of a step
are named in it; otherwise naming them costs nothing, because the names are put around the methods
only then.
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

LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}")
Named = tuple[object, str, str]  #: object, method, what a trace calls it


def profile_folder() -> Path:
    """Where this process writes traces."""
    named = os.environ.get("GLOWPLUG_PROFILE_DIR") or os.environ.get("SGLANG_TORCH_PROFILER_DIR")
    return Path(named or "profiles")


def step_phases(scheduler: Scheduler, runner: Runner) -> list[Named]:
    """What a step consists of, from the scheduler's choice to its commit."""
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
        (runner.model, "logits", "logits"),
        (runner.speculative, "accept", "accept"),
        (runner.sampler, "sample", "sample"),
        (runner, "_to_host", "results to host"),
        (scheduler, "commit", "commit"),
    ]


class Profiler:
    """One rank's profiler. ``start`` and ``stop`` are Control handlers; ``named``: methods to show
    in a trace, the last of which ends a step.
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
        """Begin a trace, of ``num_steps`` steps or until ``stop``. RequestError when one runs
        already or the label is not plain.
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
        """End the trace and write it; returns the file's name, also of one that has ended by
        itself.
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
        """Puts a range around each method, as an attribute of the object that hides it."""
        for owner, method, name in self._named:
            if hasattr(owner, "__dict__") and method not in vars(owner):
                shown = ranged(getattr(owner, method), name)
                last = owner is self._named[-1][0] and method == self._named[-1][1]
                setattr(owner, method, self._counted(shown) if last and self._steps_left else shown)
                self._hidden.append((owner, method))

    def _counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work``, and the end of the trace behind its ``num_steps``-th call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            result = work(*args, **kwargs)
            self._steps_left -= 1
            if not self._steps_left:
                self._end_quietly()
            return result

        return run

    def _end_quietly(self) -> None:
        """NOTE: nobody waits for an answer here, and a trace that cannot be written must not end
        the engine.
        """
        try:
            self._finish()
        except RequestError as error:
            logging.getLogger("glowplug").warning("%s", error)


def ranged(work: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``work`` as a range ``name`` of a trace."""

    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return work(*args, **kwargs)

    return run
