"""Conversion of a request's fields for structured output."""

from __future__ import annotations

from typing import Any

import msgspec

from glowplug.core.errors import RequestError
from glowplug.core.step.structured import GrammarSpec, StructuredOutputsParams, grammar_spec
from glowplug.entrypoints.server.protocol.structured import GrammarFields, OpenAIGrammarFields

#: field of a request -> kind of its grammar
NAMED = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def grammar_of(fields: GrammarFields) -> GrammarSpec | None:
    """Return the grammar that a request states, or None.

    Raises:
        RequestError: several are given, or one is invalid.
    """
    found = [
        (name, grammar_spec(kind, value, name))
        for name, kind in NAMED.items()
        if (value := getattr(fields, name, None)) is not None
    ]
    if isinstance(fields, OpenAIGrammarFields):
        found += _others(fields)
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(
            f"{found[1][0]}: only one kind of structured output may be given, got {names}",
            param=found[1][0],
        )
    return found[0][1] if found else None


def _others(fields: OpenAIGrammarFields) -> list[tuple[str, GrammarSpec]]:
    """Return the grammars of the fields that do not state one directly, with their names."""
    found = []
    if fields.guided_json_object:
        found.append(("guided_json_object", grammar_spec("json_object", None, "")))
    if fields.structured_outputs:
        try:
            params = msgspec.convert(fields.structured_outputs, StructuredOutputsParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"structured_outputs: {error}", param="structured_outputs") from None
        found.append(("structured_outputs", params.spec()))
    made = _response_format(fields.response_format)
    return found if made is None else [*found, ("response_format", made)]


def _response_format(value: Any) -> GrammarSpec | None:
    """Return the grammar of OpenAI's ``response_format``; None for text."""
    name = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return grammar_spec("json_object", None, name)
    if kind == "structural_tag":
        return grammar_spec("structural_tag", value, name)
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is None:
            raise RequestError(f"{name} needs json_schema.schema", param=name)
        return grammar_spec("json_schema", schema, name)
    raise RequestError(
        f"{name} must be an object with type text, json_object, json_schema or structural_tag",
        param=name,
    )
