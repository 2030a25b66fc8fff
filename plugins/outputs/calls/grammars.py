"""Grammars of answers with tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glowplug.core.protocols import OutputRequest
from glowplug.core.step.structured import GrammarSpec
from glowplug.core.step.tools import Tool

NUMBERS = 4  #: numbers that a grammar allows calls, where the format numbers them


@dataclass(frozen=True)
class Frame:
    """The text around the arguments of a call.

    Attributes:
        trigger: text with which a call begins, whatever its function.
        begin: text from the trigger to the arguments.
        end: text after the arguments.
    """

    trigger: str
    begin: str
    end: str


def required(request: OutputRequest) -> GrammarSpec:
    """Return the grammar of a JSON list of calls of the request's tools, or of the named tool."""
    named = request.tool_choice.name
    tools = [tool for tool in request.tools if not named or tool.name == named]
    several = len(tools) > 1
    calls = [
        _call_schema(tool, f"#/items/anyOf/{i}" if several else "#/items")
        for i, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls} if several else calls[0],
    }
    if named or not request.tool_choice.parallel:
        schema["maxItems"] = 1
    return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False))


def strict(
    request: OutputRequest, frame_of: Callable[[str, int], Frame], numbered: bool
) -> GrammarSpec:
    """Return the grammar of any text in which the calls of strict tools match their schemas.

    The grammar begins with each call.

    Args:
        request: the request.
        frame_of: function from the name of a tool and the number of a call to its frame.
        numbered: frames have the number of the call.
    """
    several = numbered and request.tool_choice.parallel
    first = request.earlier_calls
    structures = []
    triggers = set()
    for tool in request.tools:
        schema = tool.schema if tool.strict else {"type": "object"}
        for number in range(first, first + (NUMBERS if several else 1)):
            frame = frame_of(tool.name, number)
            triggers.add(frame.trigger)
            structures.append({"begin": frame.begin, "schema": schema, "end": frame.end})
    tag = {"type": "structural_tag", "structures": structures, "triggers": sorted(triggers)}
    return GrammarSpec("structural_tag", json.dumps(tag, ensure_ascii=False))


def _call_schema(tool: Tool, place: str) -> dict[str, Any]:
    """Return the schema of a call of ``tool``. ``place``: its JSON pointer in the whole schema."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            "parameters": moved(tool.schema, f"{place}/properties/parameters"),
        },
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
