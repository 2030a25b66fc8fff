"""Settings of a conversation that ``/set`` and ``/system`` change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


def _switch(text: str) -> bool:
    """Parse "on" or "off".

    Raises:
        ValueError: the text is neither.
    """
    if text not in ("on", "off"):
        raise ValueError(text)
    return text == "on"


#: name -> (conversion of the text given to ``/set``, description of its values)
SETTABLE: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number"),
    "top_p": (float, "a number"),
    "top_k": (int, "an integer"),
    "min_p": (float, "a number"),
    "max_tokens": (int, "an integer"),
    "seed": (int, "an integer"),
    "thinking": (_switch, "on or off"),
}


@dataclass
class ChatSettings:
    """Settings of a conversation; None: the default of the server or of the engine."""

    system: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    thinking: bool | None = None

    def set(self, name: str, text: str) -> None:
        """Set a value from its text; "default" removes it.

        Raises:
            ValueError: there is no such setting, or the text is no value of it.
        """
        if name not in SETTABLE:
            raise ValueError(f"no setting {name!r}; there are {', '.join(SETTABLE)}")
        convert, values = SETTABLE[name]
        try:
            setattr(self, name, None if text == "default" else convert(text))
        except ValueError:
            raise ValueError(f"{name} is {values} or default, not {text!r}") from None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that are set, by their names in requests."""
        names = SETTABLE.keys() - {"thinking"}
        return {name: value for name, value in self.shown().items() if name in names}

    def shown(self) -> dict[str, Any]:
        """Return all values that are set, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value not in (None, "")}
