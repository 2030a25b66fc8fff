"""Tables of the generated pages: cells, and the rows of options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import WithJsonSchema


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines) + "\n"
    )


def type_of(annotation: Any) -> str:
    for part in get_args(annotation):  # a path whose file is read into an object
        for item in getattr(part, "__metadata__", ()):
            if isinstance(item, WithJsonSchema) and item.json_schema is not None:
                return f"{item.json_schema['format']} | None"
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(type_of, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        bounds = ", ".join(_bounds([one for mark in marks for one in mark.metadata]))
        return type_of(kind) + (f" ({bounds})" if bounds else "")
    shown = (
        annotation.__name__
        if isinstance(annotation, type) and not getattr(annotation, "__args__", None)
        else str(annotation)
    )
    shown = shown.replace("typing.", "").replace("NoneType", "None")
    literal = re.fullmatch(r"Literal\[(.*)\]", shown)
    return literal.group(1).replace("'", "").replace(", ", " \\| ") if literal else shown


def option_rows(model: Any, skip: frozenset[str]) -> list[tuple[object, ...]]:
    rows = []
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        default = (
            "required"
            if field.is_required()
            else repr(field.get_default(call_default_factory=True))
        )
        bounds = ", ".join(_bounds(field.metadata))
        rows.append(
            (
                f"`{name}`",
                type_of(field.annotation).replace("\\|", "|") + (f" ({bounds})" if bounds else ""),
                f"`{default}`",
                field.description or "",
            )
        )
    return rows


def _bounds(metadata: list[Any]) -> Iterator[str]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >="}
    for item in metadata:
        for attribute, sign in signs.items():
            value = getattr(item, attribute, None)
            if value is not None:
                yield f"{sign} {value}"


def unchanged(base: Any, model: Any) -> frozenset[str]:
    """Fields that a component takes over from its slot's base as they are, and ``use``."""
    fields = model.model_fields
    same = {
        name
        for name, field in (base.model_fields if base else {}).items()
        if repr(fields[name]) == repr(field)
    }
    return frozenset(same | {"use"})
