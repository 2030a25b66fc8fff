"""A torch profiler that requests can switch on and off; writes Chrome traces under one directory.

The directory is ``GLOWPLUG_PROFILE_DIR`` or ``SGLANG_TORCH_PROFILER_DIR`` (debug switches), else ``./profiles``.
A request names a label, never a path.
"""
from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import torch

from glowplug.core.errors import RequestError

LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}")


def profile_folder() -> Path:
    """Where this process writes traces."""
    named = os.environ.get("GLOWPLUG_PROFILE_DIR") or os.environ.get("SGLANG_TORCH_PROFILER_DIR")
    return Path(named or "profiles")


class Profiler:
    """One rank's profiler. ``start`` and ``stop`` are Control handlers."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank = rank
        self._cuda = device.startswith("cuda")
        self._active: Any = None
        self._label = ""

    def start(self, args: dict[str, Any]) -> dict[str, Any]:
        """Begin a trace. RequestError when one runs already or the label is not plain."""
        label = str(args.get("label") or "trace")
        if not LABEL.fullmatch(label):
            raise RequestError("a profile label has 1 to 64 letters, digits, '-' or '_'", param="label")
        if self._active is not None:
            raise RequestError("a profile is already running")
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._label = label
        self._active = torch.profiler.profile(activities=kinds)
        self._active.start()
        return {}

    def stop(self, args: dict[str, Any]) -> dict[str, Any]:
        """End the trace and write it; returns the file's name."""
        if self._active is None:
            raise RequestError("no profile is running")
        active, self._active = self._active, None
        active.stop()
        folder = profile_folder()
        name = f"{self._label}-rank{self.rank}-{int(time.time())}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            active.export_chrome_trace(str(folder / name))
        except OSError as error:
            raise RequestError(f"the trace could not be written: {error.strerror}") from error
        return {"file": name}
