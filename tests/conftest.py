"""Triton kernels are interpreted where no NVIDIA driver is; Triton decides when a kernel's module
is first imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glowplug.core.startup.garbage import settle_memory
from tests.support.tables import forget

DRIVER = Path("/dev/nvidiactl")

if not DRIVER.exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
elif (
    "PYTEST_XDIST_WORKER_COUNT" in os.environ
):  # processes that all reckon on every core come to wait for each other
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Full garbage collections from here on look at what tests make, not at six thousand of them
    each time.
    """
    settle_memory()


@pytest.fixture
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that tuned tables are read from, empty; ``tables.forget`` behind what is written
    into it.
    """
    monkeypatch.setattr("glowplug.kernels.launch.tuned_tables.FOLDER", tmp_path)
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads that wait for one another need the interpreter sooner than every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)
