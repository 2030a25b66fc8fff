"""Programs that share one device and are measured in turns: all may load at once, while the others
stand still.

A program is held by stopping every process of its group (SIGSTOP): nothing of it runs on the host,
and its device has nothing to do once what was launched is done.
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

POLL = 0.05  #: seconds between two looks at a program
SETTLED = 1.0  #: seconds after which a program that was stopped has nothing left on the device

Loaded = Callable[[str], bool]  #: of a program's log so far: has it come to where its turn begins?


class Turn:
    """One program, its log, and whether it is loaded. ``with``: it and all that it started are gone
    on exit.

    Args:
        name: for messages.
        command: argv, started at once in a process group of its own.
        log: file for its output.
        environment: on top of this process's.
        loaded: says when its turn may begin; default: at once.
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

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def loaded(self) -> bool:
        """Has it come to its turn, or ended before that, which ``check`` says?"""
        if self._loaded(self.log.read_text(errors="replace")):
            return True
        if self._process.poll() is None:
            return False
        self._error = self._failed(f"ended with {self._process.returncode} while it was loading")
        return True

    def late(self, timeout: float) -> None:
        """It had ``timeout`` seconds to load and is not waited for any longer."""
        self._error = self._failed(f"was not loaded after {timeout:g} s")
        self.end()

    def check(self) -> None:
        """RuntimeError with the end of its log where it has not come to its turn."""
        if self._error is not None:
            raise self._error

    def hold(self) -> None:
        self._signal(signal.SIGSTOP)
        self._held = True

    def go(self) -> None:
        if self._held:
            self._signal(signal.SIGCONT)
        self._held = False

    def finish(self, timeout: float) -> None:
        """Wait until it has ended. RuntimeError: ``check``, a status other than 0, or ``timeout``
        seconds went by.
        """
        self.check()
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._failed(f"did not end in {timeout:g} s") from None
        if status:
            raise self._failed(f"ended with {status}")

    def end(self, patience: float = 30.0) -> None:
        """Ask it to end; after ``patience`` seconds, and whatever it has left behind, kill."""
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
            os.killpg(self._process.pid, number)  # which is its group's, too
        except ProcessLookupError:
            pass

    def _failed(self, how: str) -> RuntimeError:
        return RuntimeError(f"{self.name} {how}:\n{self.said()}")

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]


def in_turns(
    starts: Sequence[Callable[[], Turn]], together: bool, timeout: float
) -> Generator[Turn]:
    """Each program, loaded, for as long as it is its turn: the others are stopped or do not run.
    Close it when done.

    Args:
        starts: what starts each.
        together: load all at once, each held as soon as it is loaded.
        timeout: seconds to load in. One that takes longer, or ends, has its turn as well:
            ``Turn.check`` says so.
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


def _load(turns: Sequence[Turn], timeout: float, hold: bool = True) -> None:
    waiting = list(turns)
    deadline = time.monotonic() + timeout
    while waiting:
        for turn in [turn for turn in waiting if turn.loaded()]:
            waiting.remove(turn)
            if hold:
                turn.hold()
        if waiting and time.monotonic() > deadline:
            for turn in waiting:
                turn.late(timeout)
            break
        time.sleep(POLL)
    if turns and hold:
        time.sleep(SETTLED)


def answers(url: str) -> bool:
    """Does a GET there succeed?"""
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (HTTPError, OSError):
        return False
