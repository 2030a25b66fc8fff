"""Schemas of arguments, taken apart for formats that write each argument by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: keywords of an object's schema whose meaning its parameters, one by one, keep
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
_DEFINITIONS = ("$defs", "definitions")
#: keywords that restrict no value
NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
)
_HOPS = 8  #: references that are followed from one schema to the next


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function.

    Attributes:
        name: name of the parameter.
        schema: JSON schema of its value, complete in itself.
        required: each call has the parameter.
    """

    name: str
    schema: Mapping[str, Any]
    required: bool

    @property
    def kind(self) -> str:
        """The JSON type of the value; "": it may have several."""
        stated = self.schema.get("type", "")
        return stated if isinstance(stated, str) else ""

    @property
    def texts(self) -> list[str] | None:
        """The texts of which the value is one; None: it may be another text, or no text."""
        given = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
            return None
        return given if self.kind in ("", "string") and self._keeps("const", "enum") else None

    @property
    def free_text(self) -> bool:
        """True if any text is a value."""
        return self.kind == "string" and self._keeps()

    def _keeps(self, *keywords: str) -> bool:
        """Return whether only the type and ``keywords`` restrict the value."""
        return not self.schema.keys() - {"type", *keywords, *_DEFINITIONS} - NOTES


def parameters_of(schema: Mapping[str, Any]) -> list[Parameter] | None:
    """Return the parameters of a function, in the order of its schema.

    The calls that have these parameters, each with a value of its schema, match ``schema``.

    Args:
        schema: JSON schema of the arguments, an object.

    Returns:
        the parameters; None if the schema cannot be taken apart: it restricts the object in another
        way, leaves the names open, or refers to parts of itself other than its definitions.
    """
    if not _can_be_taken_apart(schema):
        return None
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    required = schema.get("required", [])
    found = []
    for name, given in schema.get("properties", {}).items():
        value = {} if given is True else given
        if not isinstance(value, dict):
            return None
        value = _followed(value, schema)
        whole = {**value, **definitions} if any(_references(value)) else value
        found.append(Parameter(name, whole, name in required))
    return found


def _can_be_taken_apart(schema: Mapping[str, Any]) -> bool:
    """Return whether an object matches a schema if each of its values does."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if schema.keys() - _OF_OBJECTS - NOTES - {*_DEFINITIONS} or schema.get("type") != "object":
        return False
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if not properties and schema.get("additionalProperties", True) is not False:
        return False
    return not set(required) - properties.keys() and all(map(_plain, _references(schema)))


def _references(schema: Any) -> Iterator[Any]:
    """Yield the references within a schema."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            yield from (value for key, value in part.items() if key in ("$ref", "$dynamicRef"))
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _plain(reference: Any) -> bool:
    """Return whether a reference leads to a definition."""
    return isinstance(reference, str) and reference.startswith(
        tuple(f"#/{key}/" for key in _DEFINITIONS)
    )


def _followed(value: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition to which a value's schema refers, if it says nothing else."""
    for _ in range(_HOPS):
        if "$ref" not in value or value.keys() - {"$ref"} - NOTES:
            break
        target: Any = schema
        for key in value["$ref"].split("/")[1:]:
            target = target.get(key) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        value = target
    return value
