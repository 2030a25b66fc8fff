"""Calls as a list of calls of Python: ``[get_weather(city="Paris", days=3), time(zone=None)]``.

Llama 3.2 and Llama 4 write them, Llama 4 between ``<|python_start|>`` and ``<|python_end|>``.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from glowplug.core.protocols import OutputRequest
from glowplug.plugins.outputs.calls import grammars
from glowplug.plugins.outputs.calls.base import CallParser
from glowplug.plugins.outputs.calls.grammars import Form
from glowplug.plugins.outputs.calls.parameters import NOTES, Parameter, parameters_of
from glowplug.plugins.outputs.calls.python_literals import LiteralReader
from glowplug.plugins.outputs.calls.source import Found, Steps

STARTS = ("<|python_start|>", "<|python_tag|>")
END = "<|python_end|>"
BLANKS = 32  #: most characters of white space between the bracket of a list and its first call
_TAGS = "|".join(map(re.escape, (*STARTS, END)))
#: what may begin a tag or a list at the end of a text
_PARTIAL = re.compile(rf"(?:<[|a-z_]{{0,15}}|\[\s{{0,{BLANKS}}}[A-Za-z0-9_.-]{{0,128}})\Z")
_FUNCTION = re.compile(r"[A-Za-z0-9_.-]*")
_PARAMETER = re.compile(r"\w*")
_ANY_PARAMETER = "[A-Za-z_][A-Za-z0-9_]{0,63}"


class PythonicParser(CallParser):
    """The parser of lists of calls.

    A list begins with a call of one of the request's tools or, behind a tag, of any function; any
    other list is content. Arguments have names, and literals as values. Text behind a call that is
    not of this form is content.
    """

    def __init__(self, request: OutputRequest) -> None:
        super().__init__(request)
        names = "|".join(re.escape(tool.name) for tool in request.tools)
        self._begin = re.compile(f"{_TAGS}|\\[\\s{{0,{BLANKS}}}(?:{names})\\(")
        self._literals = LiteralReader(self.source, self.arguments)

    def run(self) -> Steps:
        while begin := (yield from self.source.until_match(self._begin, _PARTIAL, self.content)):
            blank: list[str] = []
            if begin[0] == "[":
                yield from self._calls(begin[1:-1].strip())
            elif begin == END and self.index >= 0:
                self.beside_call()
            elif begin in STARTS and (yield from self.source.next(blank.append)) == "[":
                self.beside_call()
                self.source.take()
                yield from self._calls((yield from self._name()))
            else:
                self.content(begin + "".join(blank))

    def _calls(self, name: str) -> Steps:
        """Parse calls of a list behind the opening bracket of the first one.

        ``name``: name of the first function.
        """
        while name:
            self.call(name)
            if not (yield from self._arguments()):
                return
            first = yield from self.source.next()
            if first in (",", "]"):
                self.source.take()
            name = (yield from self._name()) if first == "," else ""

    def _name(self) -> Found:
        """Consume the name of a call and its bracket; return "" if none is next."""
        yield from self.source.next()
        name = yield from self.source.word(_FUNCTION)
        ahead = yield from self.source.peek(len(name) + 1)
        if ahead == name + "(" or len(ahead) == len(name):  # a call, or the end of the text
            self.source.skip(len(ahead))
        return name if ahead == name + "(" else ""

    def _arguments(self) -> Generator[None, None, bool]:
        """Parse the arguments of a call; return whether it is complete."""
        count = 0
        while (first := (yield from self.source.next())) != ")":
            if count:
                if first != ",":
                    return False
                self.source.take()
                if (yield from self.source.next()) == ")":
                    break
            name = yield from self.source.word(_PARAMETER)
            self.source.skip(len(name))
            behind = yield from self.source.next()
            if behind != "=":
                self.content(name if behind else "")
                return False
            self.source.take()
            self.arguments(f'{", " if count else "{"}"{name}": ')
            count += 1
            if not (yield from self._literals.value()):
                return False
        self.source.take()
        self.arguments("}" if count else "{}")
        return True


def body(schema: Mapping[str, Any] | None) -> Form | None:
    """Return the form of the arguments of a call: those required first, then the others.

    Texts are written as in JSON, which Python reads in the same way. True and False are words of
    Python where a parameter is a boolean, and words of JSON within lists and dicts.

    Args:
        schema: JSON schema of the arguments; None: any arguments.

    Returns:
        the form; None if the schema cannot be taken apart, or a name is no word of Python.
    """
    if schema is None or not schema.keys() - {"type"} - NOTES:
        return _any_arguments()
    parameters = parameters_of(schema)
    if parameters is None or not all(one.name.isidentifier() for one in parameters):
        return None
    needed = [one for one in parameters if one.required]
    others = [one for one in parameters if not one.required]
    if needed:
        first, *rest = needed
        behind = [_argument(", ", one) for one in rest]
        return grammars.sequence(_argument("", first), *behind, *_tail(others))
    return _first_optional(others) if others else grammars.constant("")


def _any_arguments() -> Form:
    """Return the form of arguments with any names and values."""
    name = {"type": "regex", "pattern": _ANY_PARAMETER}
    one = grammars.sequence(name, grammars.constant("="), grammars.json_value({}))
    more = {"type": "star", "content": grammars.sequence(grammars.constant(", "), one)}
    return _optional(grammars.sequence(one, more))


def _first_optional(parameters: Sequence[Parameter]) -> Form:
    """Return the form of arguments all of which may be left out."""
    starts = [
        grammars.sequence(_argument("", one), *_tail(parameters[i + 1 :]))
        for i, one in enumerate(parameters)
    ]
    return _optional(grammars.one_of(starts))


def _tail(parameters: Sequence[Parameter]) -> list[Form]:
    """Return the forms of optional arguments behind another one."""
    return [_optional(_argument(", ", one)) for one in parameters]


def _argument(before: str, parameter: Parameter) -> Form:
    """Return the form of an argument with the text before it."""
    value = grammars.json_value(parameter.schema)
    if parameter.schema.keys() - NOTES == {"type"} and parameter.kind == "boolean":
        value = grammars.one_of([grammars.constant(word) for word in ("True", "False")])
    return grammars.sequence(grammars.constant(f"{before}{parameter.name}="), value)


def _optional(form: Form) -> Form:
    """Return the form of a form that may be left out."""
    return {"type": "optional", "content": form}
