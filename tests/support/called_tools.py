"""Tools whose calls a random model ends soon, and a check of calls against their schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsonschema

from glowplug.core.protocols import Piece
from glowplug.core.step.tools import Tool

PAINT = Tool(
    "paint",
    "Paint a wall",
    {
        "type": "object",
        "properties": {
            "colour": {"$ref": "#/$defs/colour"},
            "coats": {"type": "integer", "minimum": 1, "maximum": 9},
            "dry": {"type": "boolean"},
            "code": {"type": "string", "pattern": "^[a-f]{2,4}$"},
            "spots": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {"x": {"enum": [0, 1.5, None, "<é"]}},
                    "required": ["x"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["colour", "spots"],
        "additionalProperties": False,
        "$defs": {"colour": {"type": "string", "enum": ["red", "redder", "grün"]}},
    },
)
STOP = Tool("stop", "Stop", {"type": "object", "properties": {}, "additionalProperties": False})
#: a schema whose parameters depend on one another
EITHER = Tool(
    "paint_or_stop",
    "Paint or stop",
    {
        "type": "object",
        "anyOf": [
            {
                "properties": {"stop": {"const": True}},
                "required": ["stop"],
                "additionalProperties": False,
            },
            {
                "properties": {"coats": {"enum": [1, 2]}},
                "required": ["coats"],
                "additionalProperties": False,
            },
        ],
    },
)
TOOLS = (PAINT, STOP, EITHER)


def valid_calls(pieces: Sequence[Piece], tools: Sequence[Tool] = TOOLS) -> list[str]:
    """Check that an answer consists of calls that match their schemas; return their names."""
    names: list[str] = []
    arguments: list[str] = []
    for piece in pieces:
        assert piece.kind == "tool_call" and piece.data is not None, piece
        if "name" in piece.data:
            names.append(piece.data["name"])
            arguments.append("")
        arguments[-1] += piece.text
    schemas = {tool.name: tool.schema for tool in tools}
    for name, text in zip(names, arguments, strict=True):
        jsonschema.validate(json.loads(text), schemas[name])
    return names
