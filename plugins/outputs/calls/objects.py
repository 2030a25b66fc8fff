"""Calls that are JSON objects: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from glowplug.plugins.outputs.calls.base import CallParser
from glowplug.plugins.outputs.calls.source import Emit, Found, Steps, ignore

ARGUMENTS = frozenset({"arguments", "parameters"})  #: keys of the arguments


class ObjectParser(CallParser):
    """A parser of calls that are JSON objects; subclasses define ``run``."""

    def call_object(self) -> Generator[None, None, bool]:
        """Parse an object whose opening brace is next; return whether it is a call.

        The name may follow the arguments, which are then held back. Arguments that are a JSON text
        within a string are taken out of it.
        """
        self.source.take()
        named = given = False
        held: list[str] = []
        while (key := (yield from self._key())) is not None:
            if key == "name" and not named:
                name = decoded((yield from self.collected()))
                if not isinstance(name, str) or not name:
                    return False
                named = True
                self.call(name)
                self.arguments("".join(held))
            elif key in ARGUMENTS and not given:
                given = True
                yield from self._arguments(self.arguments if named else held.append)
            else:
                yield from self.source.json(ignore)
        if named and not given and not self.source.ended:
            self.arguments("{}")
        return named

    def _arguments(self, add: Emit) -> Steps:
        """Parse the value of the arguments and pass it to ``add``."""
        if (yield from self.source.next()) == "{":
            yield from self.source.json(add)
            return
        text = yield from self.collected()
        value = decoded(text)
        if isinstance(value, str):
            add(value or "{}")
        elif text == "null":
            add("{}")
        elif not text.startswith('"'):
            add(text)

    def _key(self) -> Generator[None, None, str | None]:
        """Parse a key and its colon; return None at the end of the object or of the text."""
        first = yield from self.source.next()
        while first == ",":
            self.source.take()
            first = yield from self.source.next()
        if first != '"':
            if first == "}":
                self.source.take()
            return None
        key = decoded((yield from self.collected()))
        if (yield from self.source.next()) != ":":
            return None
        self.source.take()
        return key if isinstance(key, str) else None

    def collected(self) -> Found:
        """Consume a JSON value and return its text."""
        parts: list[str] = []
        yield from self.source.json(parts.append)
        return "".join(parts)


def decoded(text: str) -> Any:
    """Return the value of a JSON text; None if it is invalid."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
