"""Grammars of answers with tool calls, as structural tags.

A structural tag is a tree of forms in the notation of xgrammar, which every grammar library of the
``grammar`` slot reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from glowplug.core.protocols import OutputRequest
from glowplug.core.step.structured import GrammarSpec
from glowplug.core.step.tools import Tool

Form = dict[str, Any]  #: a form of a structural tag
NUMBER = "[0-9]{1,4}"  #: the number of a call, where an answer may have several


@dataclass(frozen=True)
class Frame:
    """The text around the arguments of a call.

    Attributes:
        trigger: text with which a call begins, whatever its function.
        begin: text from the trigger to the arguments, or to the number of the call.
        end: text after the arguments.
        counted: text between the number of the call and its arguments; "": ``begin`` has the
            number, or the format has none.
    """

    trigger: str
    begin: str
    end: str
    counted: str = ""


@dataclass(frozen=True)
class CallLayout:
    """The text around and between the calls of an answer.

    Attributes:
        opening: text before the first call.
        separator: text between two calls.
        closing: text after the last call.
    """

    opening: str = ""
    separator: str = ""
    closing: str = ""


class CallFormat(Protocol):
    """The parts of a format of which its grammars are made.

    Attributes:
        layout: the text around and between calls.
    """

    layout: CallLayout

    def frame(self, name: str, number: int | None) -> Frame:
        """Return the text around the arguments of a call.

        Args:
            name: name of the function.
            number: number of the call in the conversation; None: it is left to the model.
        """
        ...

    def body(self, schema: Mapping[str, Any] | None) -> Form:
        """Return the form of a call's arguments. ``schema``: JSON schema; None: any arguments."""
        ...


def allowed_tools(request: OutputRequest) -> list[Tool]:
    """Return the tools of which one has to be called."""
    named = request.tool_choice.name
    return [tool for tool in request.tools if not named or tool.name == named]


def required(request: OutputRequest, style: CallFormat) -> GrammarSpec:
    """Return the grammar of calls of the request's tools, or of one call of the named tool."""
    named = request.tool_choice.name
    single = bool(named) or not request.tool_choice.parallel
    number = request.earlier_calls if single else None
    calls = {
        "type": "tags_with_separator",
        "tags": [
            _call(style.frame(tool.name, number), style.body(tool.schema))
            for tool in allowed_tools(request)
        ],
        "separator": style.layout.separator,
        "at_least_one": True,
        "stop_after_first": single,
    }
    return spec(sequence(constant(style.layout.opening), calls, constant(style.layout.closing)))


def strict(
    request: OutputRequest, style: CallFormat, around: CallLayout | None = None
) -> GrammarSpec:
    """Return the grammar of any text in which the calls of strict tools match their schemas.

    The grammar begins with each call.

    Args:
        request: the request.
        style: the format.
        around: text around each call; None: none.
    """
    opening, closing = (around.opening, around.closing) if around else ("", "")
    number = None if request.tool_choice.parallel else request.earlier_calls
    tags = []
    triggers = set()
    for tool in request.tools:
        frame = style.frame(tool.name, number)
        frame = replace(
            frame,
            trigger=opening + frame.trigger,
            begin=opening + frame.begin,
            end=frame.end + closing,
        )
        triggers.add(frame.trigger)
        tags.append(_call(frame, style.body(tool.schema if tool.strict else None)))
    return spec({"type": "triggered_tags", "triggers": sorted(triggers), "tags": tags})


def spec(form: Form) -> GrammarSpec:
    """Return the grammar of a form."""
    tag = {"type": "structural_tag", "format": form}
    return GrammarSpec("structural_tag", json.dumps(tag, ensure_ascii=False))


def constant(text: str) -> Form:
    """Return the form of a constant text."""
    return {"type": "const_string", "value": text}


def json_value(schema: Mapping[str, Any]) -> Form:
    """Return the form of a JSON value that matches a schema."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def sequence(*forms: Form) -> Form:
    """Return the form of one form behind the other; empty texts are left out."""
    elements = [form for form in forms if form != constant("")] or [constant("")]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def one_of(forms: Sequence[Form]) -> Form:
    """Return the form of one of several forms."""
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}


def between(begin: str, content: Form, end: str) -> Form:
    """Return the form of a content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _call(frame: Frame, body: Form) -> Form:
    """Return the form of a call with the form of its arguments."""
    if frame.counted:
        number = {"type": "regex", "pattern": NUMBER}
        body = sequence(number, constant(frame.counted), body)
    return between(frame.begin, body, frame.end)


def required_list(request: OutputRequest) -> GrammarSpec:
    """Return the grammar of a JSON list of calls of the request's tools, or of the named tool."""
    named = request.tool_choice.name
    tools = allowed_tools(request)
    calls = [_call_schema(tool, f"#/$defs/{i}") for i, tool in enumerate(tools)]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls} if len(calls) > 1 else calls[0],
        "$defs": {str(i): moved(tool.schema, f"#/$defs/{i}") for i, tool in enumerate(tools)},
    }
    if named or not request.tool_choice.parallel:
        schema["maxItems"] = 1
    return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False))


def _call_schema(tool: Tool, place: str) -> dict[str, Any]:
    """Return the schema of a call of ``tool``. ``place``: JSON pointer to its arguments' schema."""
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": {"$ref": place}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def moved(schema: Any, place: str) -> Any:
    """Return a schema whose references stay valid when it stands at ``place`` in another schema.

    ``place``: JSON pointer in the other schema.
    """
    if isinstance(schema, dict):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else moved(value, place)
            for key, value in schema.items()
        }
    return [moved(one, place) for one in schema] if isinstance(schema, list) else schema
