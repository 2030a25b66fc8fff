"""Calls in DSML, the markup of DeepSeek V3.2, V4 and V4.1.

A call has parameters as elements, or a JSON object as its body::

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from glowplug.core.protocols import OutputRequest
from glowplug.plugins.outputs.calls import grammars
from glowplug.plugins.outputs.calls.base import CallParser
from glowplug.plugins.outputs.calls.grammars import CallLayout, Form, Frame
from glowplug.plugins.outputs.calls.parameters import NOTES, Parameter, parameters_of
from glowplug.plugins.outputs.calls.source import Steps, ignore

DSML = "｜DSML｜"
_QUOTE = '"'
_UNSAFE = frozenset('"<>\n')  #: characters that a name cannot have within a tag
_NAME = "[A-Za-z0-9_.-]{1,64}"  #: names of parameters that no schema states
#: words of Python that models write instead of JSON's
_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Elements:
    """The names of the elements of a version.

    Attributes:
        calls: the element around all calls.
        space: the text before each name.
    """

    calls: str
    space: str = ""

    def opening(self, name: str) -> str:
        """Return an opening tag without its attributes and its end."""
        return f"<{DSML}{self.space}{name}"

    def closing(self, name: str) -> str:
        """Return a closing tag."""
        return f"</{DSML}{self.space}{name}>"


def layout(elements: Elements) -> CallLayout:
    """Return the text around and between calls."""
    opening = elements.opening(elements.calls)
    return CallLayout(f"\n\n{opening}>\n", "", elements.closing(elements.calls))


def frame(elements: Elements, name: str) -> Frame:
    """Return the text around the arguments of a call. ``name``: name of the function."""
    opening = elements.opening("invoke")
    return Frame(opening, f'{opening} name="{name}">\n', elements.closing("invoke") + "\n")


def body(elements: Elements, schema: Mapping[str, Any] | None) -> Form:
    """Return the form of the arguments of a call.

    Parameters are elements, in the order of the schema. Where the schema cannot be taken apart, or
    a name cannot be written in a tag, the arguments are a JSON object.

    Args:
        elements: names of the elements.
        schema: JSON schema of the arguments; None: any arguments.
    """
    if schema is None or not schema.keys() - {"type"} - NOTES:
        return {"type": "star", "content": _any_element(elements)}
    parameters = parameters_of(schema)
    if parameters is None or any(_UNSAFE & set(one.name) for one in parameters):
        return grammars.sequence(grammars.json_value(schema), grammars.constant("\n"))
    return grammars.sequence(*(_element(elements, one) for one in parameters))


def _element(elements: Elements, parameter: Parameter) -> Form:
    """Return the form of a parameter: a text as it is, any other value as JSON."""
    end = elements.closing("parameter")
    texts = parameter.texts
    as_text = parameter.free_text
    content = _any_text(elements) if as_text else grammars.json_value(parameter.schema)
    if texts and all(text and end not in text for text in texts):
        as_text = True
        content = grammars.one_of([grammars.constant(text) for text in texts])
    kind = "true" if as_text else "false"
    begin = f'{elements.opening("parameter")} name="{parameter.name}" string="{kind}">'
    form = grammars.sequence(grammars.between(begin, content, end), grammars.constant("\n"))
    return form if parameter.required else {"type": "optional", "content": form}


def _any_element(elements: Elements) -> Form:
    """Return the form of a parameter with any name and value."""
    end = elements.closing("parameter")
    return grammars.sequence(
        grammars.constant(f'{elements.opening("parameter")} name="'),
        {"type": "regex", "pattern": _NAME},
        grammars.one_of(
            [
                grammars.between('" string="true">', _any_text(elements), end),
                grammars.between('" string="false">', grammars.json_value({}), end),
            ]
        ),
        grammars.constant("\n"),
    )


def _any_text(elements: Elements) -> Form:
    """Return the form of a text without the tags that end a call."""
    tags = elements.closing("invoke"), elements.opening("invoke"), elements.closing(elements.calls)
    return {"type": "any_text", "excludes": list(tags)}


class DsmlParser(CallParser):
    """The parser of calls in DSML.

    Calls without the element around them are accepted: models leave it out in long contexts.
    """

    def __init__(self, elements: Elements, request: OutputRequest) -> None:
        super().__init__(request)
        self._open = elements.opening(elements.calls) + ">"
        self._close = elements.closing(elements.calls)
        self._invoke = elements.opening("invoke")
        self._invoked = elements.closing("invoke")
        self._parameter = elements.opening("parameter")
        self._parametered = elements.closing("parameter")
        #: tags that end a call
        self._borders = (self._invoked, self._invoke, self._close)
        self._schemas = {tool.name: tool.schema.get("properties") for tool in request.tools}

    def run(self) -> Steps:
        while True:
            tag = yield from self.source.until((self._open, self._invoke), self.content)
            if not tag:
                return
            self.beside_call()
            while tag and tag != self._close:
                if tag == self._invoke:
                    yield from self._call()
                tag = yield from self.source.until((self._invoke, self._close), ignore)

    def _call(self) -> Steps:
        """Parse a call behind the beginning of its tag. A call cut within its name is dropped."""
        attributes: list[str] = []
        if not (yield from self.source.until((">",), attributes.append)):
            return
        name = _attribute("".join(attributes), "name")
        if not name:
            return
        self.call(name)
        if (yield from self.source.next()) == "{":
            yield from self.source.json(self.arguments)
            yield from self._skip_to_end()
            return
        count = 0
        while True:
            tag = yield from self.source.until((self._parameter, *self._borders), ignore)
            if tag != self._parameter:
                break
            count += yield from self._one(name, first=not count)
        if tag:
            self.arguments("}" if count else "{}")
            if tag != self._invoked:
                self.source.back(len(tag))

    def _skip_to_end(self) -> Steps:
        """Consume the rest of a call, whose arguments are complete."""
        tag = yield from self.source.until(self._borders, ignore)
        if tag and tag != self._invoked:
            self.source.back(len(tag))

    def _one(self, function: str, first: bool) -> Generator[None, None, bool]:
        """Parse a parameter behind the beginning of its tag; return whether it has a name."""
        parts: list[str] = []
        if not (yield from self.source.until((">",), parts.append)):
            return False
        attributes = "".join(parts)
        name = _attribute(attributes, "name")
        if not name:
            return False
        self.arguments(("{" if first else ", ") + _quoted(name) + ": ")
        stated = _attribute(attributes, "string")
        if stated == "true" or (not stated and self._is_text(function, name)):
            self.arguments(_QUOTE)
            if (yield from self._value(lambda text: self.arguments(_quoted(text)[1:-1]))):
                self.arguments(_QUOTE)
            return True
        value: list[str] = []
        if (yield from self._value(value.append)):
            self.arguments(as_json("".join(value)))
        return True

    def _value(self, emit: Any) -> Generator[None, None, bool]:
        """Parse the value of a parameter; return whether it is complete.

        A value without its closing tag ends with the call. A closing tag that is cut at the end of
        the text is no part of the value.
        """
        ends = (self._parametered, *self._borders)
        tag = yield from self.source.until(ends, emit, cut=ignore)
        if tag and tag != self._parametered:
            self.source.back(len(tag))
        return bool(tag)

    def _is_text(self, function: str, name: str) -> bool:
        """Return whether the function's schema states that a parameter is a text."""
        properties = self._schemas.get(function)
        schema = properties.get(name) if isinstance(properties, dict) else None
        return isinstance(schema, dict) and schema.get("type") == "string"


def _attribute(attributes: str, name: str) -> str:
    """Return the value of an attribute of a tag; "" if it is not given."""
    _, found, rest = attributes.partition(f'{name}="')
    return rest.partition('"')[0] if found else ""


def _quoted(text: str) -> str:
    """Return ``text`` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def as_json(text: str) -> str:
    """Return a value as JSON: as it is if it is valid JSON, else as a JSON string."""
    value = text.strip()
    value = _WORDS.get(value, value)
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    return value


def _refuse(word: str) -> None:
    """Refuse ``NaN`` and infinities, which are no JSON."""
    raise ValueError(word)
