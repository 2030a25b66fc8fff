"""The parser of the command line: underscores count as hyphens, and unknown flags are explained."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

#: flags of a single command -> why the others do not have them
OF_ONE_COMMAND = {
    "--alone": "only `glowplug bench one-batch` runs one rank of a layout without the others, "
    "because its answers are meaningless; leave it out",
}
_NUMBER = re.compile(r"-\d+(?:\.\d+)?")


class Parser(argparse.ArgumentParser):
    """An argparse parser without abbreviations, in which underscores in flags count as hyphens.

    The error for an unknown flag suggests the closest known one.
    """

    #: adds further flags, given the options parsed so far; called if a flag is unknown
    late_flags: Callable[[argparse.Namespace], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([hyphened(word) for word in given], namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown and self.late_flags is not None:
            self.late_flags(found)
            self.late_flags = None
            found, unknown = self.parse_known_args(args, namespace)
        self._take_late_words(found, unknown)
        if unknown:
            self.error("; ".join(self._unexpected(unknown)))
        return found

    def _take_late_words(self, found: argparse.Namespace, unknown: list[str]) -> None:
        """Move words of ``unknown`` to optional arguments that come after flags.

        NOTE: before Python 3.13 argparse gives such an argument its default as soon as it meets a
        flag (https://github.com/python/cpython/issues/59317).
        """
        for action in self._get_positional_actions():
            missed = action.nargs == "?" and getattr(found, action.dest) == action.default
            if missed and unknown and not unknown[0].startswith("-"):
                setattr(found, action.dest, self._get_values(action, [unknown.pop(0)]))

    def has_flag(self, name: str) -> bool:
        """Return whether the parser has a flag of this name."""
        return name in self._option_string_actions

    def _unexpected(self, words: Sequence[str]) -> Iterator[str]:
        """Yield an error for each word of the command line that no option takes.

        Words after an unknown flag are taken for its values and not reported.
        """
        valued = False
        for word in words:
            if word.startswith("-") and not _NUMBER.fullmatch(word):
                yield self._unknown(word.partition("=")[0])
                valued = "=" not in word
            elif not valued:
                yield f"unexpected argument {word!r}"

    def _unknown(self, name: str) -> str:
        """Return the error for an unknown flag ``name``, with the closest known flag."""
        from glowplug.entrypoints.cli.flags.foreign import unsupported

        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        reason = OF_ONE_COMMAND.get(name, "")
        if reason:
            return f"{name}: {reason}"
        reason = unsupported(name, known)
        if reason:
            return reason
        off, stem = _sense(name)
        opposite = next((flag for flag in known if _sense(flag) == (not off, stem)), None)
        alike = [flag[2:] for flag in known if _sense(flag)[0] == off]
        close = difflib.get_close_matches(name.lstrip("-"), alike, 1, 0.6)
        if opposite and not (close and _sense(close[0])[1] == stem):
            return f"unknown flag {name}: leave {opposite} out"
        return f"unknown flag {name}" + (f", did you mean --{close[0]}?" if close else "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _sense(flag: str) -> tuple[bool, str]:
    """Return (whether a flag turns something off, its name without the words for on and off)."""
    name = flag.lstrip("-")
    off = name.startswith(("no-", "disable-"))
    return off, re.sub(r"^(no-|disable-|enable-)+", "", name)


def hyphened(word: str) -> str:
    """Replace underscores in a flag's name: ``--disable_mla`` -> ``--disable-mla``.

    Other words are returned unchanged.
    """
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
