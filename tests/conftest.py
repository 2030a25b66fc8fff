"""Triton kernels are interpreted where no NVIDIA driver is; Triton decides when a kernel's module
is first imported.
"""

from __future__ import annotations

import gc
import inspect
import os
import ssl
import sys
from collections.abc import Generator, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from glowplug.core.startup.garbage import settle_memory
from tests.support import forked_ranks, quick_interpreter
from tests.support.fault_table import injecting
from tests.support.source_tree import ROOT
from tests.support.tables import forget

DRIVER = Path("/dev/nvidiactl")

if not DRIVER.exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
elif (
    "PYTEST_XDIST_WORKER_COUNT" in os.environ
):  # processes that each use every core would wait for one another
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))


# the tables that this machine's user has measured do not count in tests
os.environ.pop("GLOWPLUG_CONFIG_DIR", None)
os.environ["XDG_DATA_HOME"] = "/nonexistent"


def pytest_configure() -> None:
    """Let interpreted kernels and rank processes take less CPU time; GPU runs stay as they are.

    HTTP clients share a TLS context: each would read all certificates anew, and none uses TLS.
    """
    ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        quick_interpreter.install()
    if not DRIVER.exists():
        forked_ranks.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--client-sites",
        default="",
        help="folders of the clients in tests/clients, with {name}: virtual environments, "
        "packages, or node_modules",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that docs/reliability.md names."""
    if not isinstance(item, pytest.Function):
        return
    code = getattr(inspect.unwrap(item.function), "__code__", None)
    files = {str(item.path), code.co_filename if code else str(item.path)}
    if any((_in_tree(file), item.originalname) in injecting() for file in files):
        item.add_marker("fault")


@cache
def _in_tree(file: str) -> str:
    """Return the path of ``file`` in the repository; "" outside."""
    path = Path(file).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a timing test in a run of timing tests: collection takes half a minute."""
    if not config.option.markexpr.startswith("timing") or collection_path.suffix != ".py":
        return None
    return True if "mark.timing" not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Switch the garbage collector off while tests are collected.

    In a new checkout, whose modules are not compiled yet, collections of garbage take a quarter of
    that time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt all existing objects, six thousand tests among them, from later full garbage
    collections.
    """
    settle_memory()


@pytest.fixture
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for tuned tables; call ``tables.forget`` after writing into it."""
    monkeypatch.setattr("glowplug.kernels.launch.tuned_tables.FOLDER", tmp_path)
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """A short switch interval: threads that wait for one another need the interpreter sooner than
    every 5 ms.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)
