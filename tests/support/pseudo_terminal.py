"""A program on a pseudo-terminal, for tests of what it prints and of keys such as Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import termios
from collections.abc import Mapping, Sequence

from tests.support.waiting import LIMIT, until

CTRL_C, CTRL_D = "\x03", "\x04"
AGAIN_SECONDS = 0.3  #: pause between two keys of ``type_until``
#: commands to a terminal other than dimming: cursor, colours, bracketed paste
COMMANDS = re.compile(r"\x1b\[\?\d+[hl]|\x1b\[[0-9;]*[A-HJKST]")


class PseudoTerminal:
    """A running program whose standard streams are a terminal.

    Attributes:
        shown: all that the program has printed, with line feeds only.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()

        def control() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=control,
        )
        os.close(slave)
        self.shown = ""
        self._read = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, part: str) -> str:
        """Wait until ``part`` is printed after the last awaited text; return all in between."""
        while (at := self.shown.find(part, self._read)) < 0:
            assert self._receive(LIMIT), f"{part!r} is not in {self.shown!r}"
        between = self.shown[self._read : at]
        self._read = at + len(part)
        return between

    def type_until(self, key: str, part: str) -> None:
        """Type a key, again until ``part`` is printed.

        NOTE: a signal that arrives after readline's prompt and before its wait for a key takes
        effect with the next key.
        """
        until(lambda: self._typed(key, part), f"{key!r} prints {part!r}")
        self.wait_for(part)

    def _typed(self, key: str, part: str) -> bool:
        self.type(key)
        self._receive(AGAIN_SECONDS)
        return part in self.shown[self._read :]

    def _receive(self, seconds: float) -> bool:
        """Read more output; return False at its end."""
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # the program has ended
            return False
        self.shown += COMMANDS.sub("", data.decode(errors="replace")).replace("\r\n", "\n")
        return bool(data)

    def end(self) -> int:
        """Wait until the program ends; return its exit code."""
        while self._receive(LIMIT):
            pass
        code = self._process.wait(LIMIT)
        os.close(self._master)
        return code
