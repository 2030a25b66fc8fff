"""Rank processes forked from a server that has imported torch.

The tests start 150 rank processes, and each import of torch takes 2 s of CPU time. Processes of
servers and commands that the tests start are spawned as in production: there nothing is installed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker
from types import SimpleNamespace
from typing import Any

import psutil

IMPORTED = ["torch", "glowplug.core.startup.build_rank", "glowplug.plugins.executors.ranks.process"]


class ForkedContext:
    """The part of a ``multiprocessing`` context that ``LocalRanks`` uses."""

    def __init__(self, method: str) -> None:
        assert method == "spawn", "the method that this one replaces"
        self._context = multiprocessing.get_context("forkserver")
        self.Pipe = self._context.Pipe

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], **named: Any) -> Any:
        """Return a process that begins with this one's environment."""
        given = (dict(os.environ), target, args)
        return self._context.Process(target=run_in, args=given, **named)


def run_in(environ: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Call ``target`` with ``environ`` in place of the server's environment."""
    os.environ.clear()
    os.environ.update(environ)
    target(*args)


def rank_processes() -> set[psutil.Process]:
    """Return this process's children and theirs, without those of ``multiprocessing`` itself."""
    own = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}  # type: ignore[attr-defined]
    return {one for one in psutil.Process().children(recursive=True) if one.pid not in own}


def install() -> None:
    """Fork the ranks that this process starts."""
    from glowplug.plugins.executors.ranks import local

    multiprocessing.set_forkserver_preload(IMPORTED)
    local.multiprocessing = SimpleNamespace(  # type: ignore[assignment]
        get_context=ForkedContext, current_process=multiprocessing.current_process
    )
