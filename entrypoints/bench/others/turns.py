"""Programs that share one device and are measured in turns.

All of them may be loaded at once; while one is measured the others are suspended. A program is
suspended by stopping every process of its process group (SIGSTOP): it then does nothing on the
host, and its device is idle once the launched work is done.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from urllib.error import HTTPError
from urllib.request import urlopen

POLL_SECONDS = 0.05  #: seconds between two checks of a program
SETTLING_SECONDS = 1.0  #: seconds after which a suspended program has no work left on the device

#: returns True if a program with this log so far is ready to be measured
Loaded = Callable[[str], bool]


class MeasuredProgram:
    """A running program with its log; as a context manager, ends the program and its descendants.

    Args:
        name: name in messages.
        command: argv, started at once in a process group of its own.
        log: file for its output.
        environment: environment variables to add to those of this process.
        loaded: returns True, given the log so far, when the measurement may begin; default: at
            once.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        loaded: Loaded = lambda log: True,
    ) -> None:
        self.name = name
        self.log = log
        self._loaded = loaded
        self._held = False
        self._error: RuntimeError | None = None
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            )

    def __enter__(self) -> MeasuredProgram:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def loaded(self) -> bool:
        """Return whether loading is over: the program is loaded, or ended early (see ``check``)."""
        if self._loaded(self.log.read_text(errors="replace")):
            return True
        if self._process.poll() is None:
            return False
        self._error = self._failed(f"ended with {self._process.returncode} while it was loading")
        return True

    def fail_loading(self, timeout: float) -> None:
        """Record that the program was not loaded within ``timeout`` seconds, and end it."""
        self._error = self._failed(f"was not loaded after {timeout:g} s")
        self.end()

    def check(self) -> None:
        """Raise a RuntimeError with the end of the log if the program failed to load."""
        if self._error is not None:
            raise self._error

    def hold(self) -> None:
        """Suspend the program until ``go``."""
        self._signal(signal.SIGSTOP)
        self._held = True

    def go(self) -> None:
        """Resume the program if it is suspended."""
        if self._held:
            self._signal(signal.SIGCONT)
        self._held = False

    def finish(self, timeout: float) -> None:
        """Wait until the program has ended.

        Raises:
            RuntimeError: it failed to load, ended with a status other than 0, or ran for longer
                than ``timeout`` seconds.
        """
        self.check()
        status = self.wait(timeout)
        if status is None:
            raise self._failed(f"did not end in {timeout:g} s")
        if status:
            raise self._failed(f"ended with {status}")

    def wait(self, timeout: float) -> int | None:
        """Wait until the program has ended and return its status, negative for a signal.

        The result is None if the program still runs after ``timeout`` seconds.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def end(self, patience: float = 30.0) -> None:
        """Terminate the program, then kill what is left of its process group.

        Args:
            patience: seconds to wait before the kill.
        """
        self.go()
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                pass
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)  # also the id of its process group
        except ProcessLookupError:
            pass

    def _failed(self, how: str) -> RuntimeError:
        return RuntimeError(f"{self.name} {how}:\n{self.log_end()}")

    def log_end(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-3000:]


def in_turns(
    starts: Sequence[Callable[[], MeasuredProgram]], together: bool, timeout: float
) -> Generator[MeasuredProgram]:
    """Start the programs and yield each one alone, once it is loaded.

    While a program is yielded, the others are suspended or not running.

    Callers must close the generator; this ends the programs.

    Args:
        starts: functions that start the programs.
        together: load all programs at once, and suspend each as soon as it is loaded.
        timeout: seconds for loading. A program that takes longer, or ends, is yielded as well:
            ``MeasuredProgram.check`` then raises.
    """
    with ExitStack() as stack:
        turns = [stack.enter_context(start()) for start in starts] if together else []
        _load(turns, timeout)
        for index, start in enumerate(starts):
            if together:
                turn = turns[index]
                turn.go()
            else:
                turn = stack.enter_context(start())
                _load([turn], timeout, hold=False)
            yield turn
            turn.end()


def _load(turns: Sequence[MeasuredProgram], timeout: float, hold: bool = True) -> None:
    """Wait until all programs are loaded; end those that take longer than ``timeout`` seconds.

    ``hold``: suspend each program as soon as it is loaded.
    """
    waiting = list(turns)
    deadline = time.monotonic() + timeout
    while waiting:
        for turn in [turn for turn in waiting if turn.loaded()]:
            waiting.remove(turn)
            if hold:
                turn.hold()
        if waiting and time.monotonic() > deadline:
            for turn in waiting:
                turn.fail_loading(timeout)
            break
        time.sleep(POLL_SECONDS)
    if turns and hold:
        time.sleep(SETTLING_SECONDS)


def answers(url: str) -> bool:
    """Return True if a GET request to ``url`` succeeds."""
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (HTTPError, OSError):
        return False
