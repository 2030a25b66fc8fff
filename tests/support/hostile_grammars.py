"""Forty grammars that try to take time, memory or the process of whatever compiles them."""

from __future__ import annotations

from typing import Any


def _deep(count: int) -> str:
    """Return nested schemas, as text: they are too deep for a JSON encoder."""
    return '{"type":"object","properties":{"a":' * count + '{"type":"integer"}' + "}}" * count


def _exponential(count: int) -> dict[str, Any]:
    """Return a schema of definitions, each of which has the next one twice."""
    definitions: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)
    }
    definitions[f"d{count}"] = {"type": "integer"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _all_of(count: int) -> dict[str, Any]:
    parts = [{"pattern": f"^.*{chr(97 + i % 26)}.{{{i}}}$"} for i in range(count)]
    return {"type": "string", "allOf": parts}


def _wide_union(count: int) -> dict[str, Any]:
    one = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(10)}}
    return {"anyOf": [{**one, "required": [f"k{i % 10}"]} for i in range(count)]}


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}}


RECURSIVE = {
    "$defs": {"t": {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}}}},
    "$ref": "#/$defs/t",
}
AMBIGUOUS = 'root ::= e\ne ::= e e | e "+" e | "a" | ""'
DOUBLING = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"'

#: field of a request's ``sampling_params`` -> its values; the last ones are wrong in another way
HOSTILE: tuple[tuple[str, Any], ...] = (
    ("regex", "(a+)+$"),
    ("regex", "(a|aa)*b"),
    ("regex", "(.*a){30}"),
    ("regex", "(a|b)*a(a|b){20}"),
    ("regex", "[ab]*a[ab]{200}"),
    ("regex", "a{1000000}"),
    ("regex", "(a{1000}){1000}"),
    ("regex", "((a{100}){100}){100}"),
    ("regex", "(x*)*" * 50),
    ("regex", "x*" * 5000),
    ("regex", "(" * 5000 + "a" + ")" * 5000),
    ("regex", "[" * 3000),
    ("regex", "(?<=x)a"),
    ("regex", "(a)\\1"),
    ("regex", "foo**"),
    ("regex", "\\p{L}{1,5000}\\d{1,5000}"),
    ("regex", "|".join(f"w{i:05}" for i in range(9000))),
    ("regex", "a" * 70000),
    ("regex", "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace") * 3 + "("),
    ("json_schema", _deep(5000)),
    ("json_schema", _deep(60)),
    ("json_schema", _exponential(40)),
    ("json_schema", RECURSIVE),
    ("json_schema", {"$ref": "#"}),
    ("json_schema", {"$ref": "http://127.0.0.1:1/schema"}),
    ("json_schema", {"type": "foo"}),
    ("json_schema", {"enum": [f"value {i}" for i in range(60000)]}),
    ("json_schema", {"enum": ["x" * 50 + str(i) for i in range(900)]}),
    ("json_schema", {"type": "array", "items": {}, "minItems": 10**9}),
    ("json_schema", {"type": "array", "items": _optional(5), "minItems": 3000}),
    ("json_schema", {"type": "string", "minLength": 10**9}),
    ("json_schema", {"type": "string", "pattern": "(a+)+$", "maxLength": 100000}),
    ("json_schema", {"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    ("json_schema", _all_of(30)),
    ("json_schema", _wide_union(150)),
    ("json_schema", _optional(1500)),
    ("ebnf", AMBIGUOUS),
    ("ebnf", DOUBLING),
    ("ebnf", "root ::= root"),
    ("ebnf", "root ::= " + "(" * 2000 + '"a"' + ")" * 2000),
)

assert len(HOSTILE) == 40
