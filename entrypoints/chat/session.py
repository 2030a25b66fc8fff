"""A conversation: messages, answers, and the commands that begin with a slash."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from glowplug.entrypoints.chat.screen import Screen
from glowplug.entrypoints.chat.settings import SETTABLE, ChatSettings
from glowplug.entrypoints.cli.exit_codes import FAILED, OK

PROMPT = "> "
CONTINUED = ". "  #: prompt after a line that ends with a backslash
#: remarks on the reasons for which answers end
ENDS = {
    "length": "[cut off at the limit of tokens]",
    "abort": "[aborted by the server]",
    "timeout": "[out of time]",
}

Message = dict[str, Any]


class ChatError(Exception):
    """The error of an answer that failed; the message is for the user."""


class ChatPart(NamedTuple):
    """New text of an answer. The last part has ``finish``, the reason of the end."""

    reasoning: str = ""
    content: str = ""
    finish: str | None = None


class ChatEngine(Protocol):
    """The engine that answers.

    Attributes:
        label: name of the model and of its place, for the first line.
    """

    label: str

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[ChatPart, None, None]:
        """Yield the answer to a conversation; closing the generator ends the request.

        Raises:
            ChatError: the answer failed.
            KeyboardInterrupt: SIGINT arrived; the request has ended.
        """
        ...

    def close(self) -> None:
        """Free the engine."""
        ...


class ChatSession:
    """A conversation with one engine.

    Attributes:
        messages: messages so far, without the system message.
        settings: settings of the next answer.
    """

    def __init__(self, engine: ChatEngine, settings: ChatSettings, screen: Screen) -> None:
        self.messages: list[Message] = []
        self.settings = settings
        self._engine = engine
        self._screen = screen
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/system": (
                self._system,
                "/system TEXT: set the system message; -: remove it; alone: show it",
            ),
            "/set": (self._set, f"/set NAME VALUE: one of {', '.join(SETTABLE)}; alone: show all"),
            "/clear": (self._clear, "/clear: begin a new conversation with the same settings"),
            "/save": (self._save, "/save FILE: write the conversation as JSON"),
            "/help": (self._help, "/help: show the commands"),
            "/quit": (self._quit, "/quit: end, as Ctrl-D does"),
        }

    # ---- input -----------------------------------------------------------------------------------

    def run_terminal(self) -> int:
        """Read messages from the terminal until its end or ``/quit``; return the exit code."""
        try:
            import readline  # noqa: F401
        except ImportError:
            pass  # lines can still be typed, without a history
        self._screen.note(f"{self._engine.label}; /help shows the commands, Ctrl-C stops an answer")
        while True:
            try:
                text = _read_message()
                self._take(text)
            except KeyboardInterrupt:
                self._screen.note("\n/quit or Ctrl-D ends")
            except EOFError:
                self._screen.end()
                return OK
            except ChatError as error:
                self._screen.note(f"error: {error}")

    def run_lines(self, lines: Iterable[str]) -> int:
        """Send each line as a message, or run it as a command; return the exit code."""
        try:
            for line in lines:
                self._take(line.rstrip("\n"))
        except EOFError:
            return OK
        except ChatError as error:
            self._screen.note(f"error: {error}")
            return FAILED
        return OK

    def run_messages(self, texts: Iterable[str]) -> int:
        """Send each text as a message, also one that begins with a slash; return the exit code."""
        try:
            for text in texts:
                self._send(text)
        except ChatError as error:
            self._screen.note(f"error: {error}")
            return FAILED
        return OK

    def _take(self, text: str) -> None:
        """Send a message, or run a command. A message may begin with two slashes for one.

        Raises:
            EOFError: the command ends the conversation.
            ChatError: the command or the answer failed.
        """
        if not text.strip():
            return
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text.partition(" ")
            self._command(name)(rest.strip())
        else:
            self._send(re.sub("^//", "/", text))

    # ---- answers ---------------------------------------------------------------------------------

    def _send(self, text: str) -> None:
        """Send a message and print its answer.

        A message whose answer fails or has no text is taken back.

        Raises:
            ChatError: the answer failed.
            KeyboardInterrupt: SIGINT arrived and messages do not come from a terminal.
        """
        self.messages.append({"role": "user", "content": text})
        system = self.settings.system
        first = [{"role": "system", "content": system}] if system else []
        found = {"reasoning": "", "content": ""}
        note = ""
        try:
            with closing(self._engine.answer([*first, *self.messages], self.settings)) as parts:
                for part in parts:
                    found["reasoning"] += part.reasoning
                    found["content"] += part.content
                    self._screen.write(part.reasoning, part.content)
                    note = ENDS.get(part.finish or "", note)
        except KeyboardInterrupt:
            if not self._screen.interactive:
                raise
            note = "[stopped]"
        except ChatError:
            self.messages.pop()
            self._screen.end()
            raise
        self._keep(found)
        self._screen.end(note)

    def _keep(self, found: dict[str, str]) -> None:
        """Add an answer to the messages; one without text takes its question back."""
        if not found["content"]:
            self.messages.pop()
            return
        kept = {name: text for name, text in found.items() if text}
        self.messages.append({"role": "assistant", **kept})

    # ---- commands --------------------------------------------------------------------------------

    def _command(self, name: str) -> Callable[[str], None]:
        """Return the function of a command.

        Raises:
            ChatError: there is no such command.
        """
        name = "/quit" if name == "/exit" else name
        if name not in self._commands:
            raise ChatError(f"no command {name}; there are {', '.join(self._commands)}")
        return self._commands[name][0]

    def _system(self, text: str) -> None:
        if text:
            self.settings.system = "" if text == "-" else text
        self._screen.note(f"system message: {self.settings.system or 'none'}")

    def _set(self, text: str) -> None:
        words = text.replace("=", " ").split()
        if len(words) not in (0, 2):
            raise ChatError(self._commands["/set"][1])
        if words:
            try:
                self.settings.set(*words)
            except ValueError as error:
                raise ChatError(str(error)) from None
        values = self.settings.shown()
        values.pop("system", None)
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        self._screen.note(f"settings: {shown or 'all at their defaults'}")

    def _clear(self, text: str) -> None:
        self.messages.clear()
        self._screen.note("a new conversation begins")

    def _save(self, text: str) -> None:
        try:
            names = shlex.split(text)
        except ValueError:
            names = []
        if len(names) != 1:
            raise ChatError(self._commands["/save"][1])
        system = self.settings.system
        first = [{"role": "system", "content": system}] if system else []
        content = {"messages": [*first, *self.messages]}
        try:
            path = Path(names[0]).expanduser()
            path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except (OSError, RuntimeError) as error:
            raise ChatError(f"{names[0]} could not be written: {error}") from None
        self._screen.note(f"{len(content['messages'])} messages written to {path}")

    def _help(self, text: str) -> None:
        lines = [line for _, line in self._commands.values()]
        self._screen.note("\n".join([*lines, "A line that ends with a backslash is continued."]))

    def _quit(self, text: str) -> None:
        raise EOFError


def _read_message() -> str:
    """Read a message from the terminal; a backslash at the end of a line continues it."""
    text = input(PROMPT)
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{input(CONTINUED)}"
    return text
