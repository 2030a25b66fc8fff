"""Structured output in requests: what the text of an answer has to match. Torch is not imported.

A request states it in one of several spellings, all of which become a :class:`GrammarSpec`.
"""

from __future__ import annotations

import json as json_text
from typing import Any

import msgspec

from glowplug.core.errors import RequestError

#: kinds of grammars that requests can state
KINDS = ("json_schema", "regex", "choice", "grammar", "structural_tag")
ANY_JSON = "$$ANY$$"  #: SGLang's spelling of the schema of any JSON value
OBJECT = '{"type":"object"}'  #: schema of ``json_object``


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A grammar as a request states it.

    Attributes:
        kind: one of ``KINDS``. "grammar" is EBNF as in llama.cpp, or Lark.
        text: the grammar; JSON for a schema, a structural tag and the list of choices.
        whitespace: JSON may have white space between its tokens.
        closing: tag at the end of the reasoning, after which the grammar begins; "": at once.
        opening: tag with which the answer may begin a reasoning; "": it may not.
        inside: the answer begins inside the reasoning.
    """

    kind: str
    text: str
    whitespace: bool = True
    closing: str = ""
    opening: str = ""
    inside: bool = False

    @property
    def key(self) -> tuple[str, str, bool]:
        """The fields on which the compiled grammar depends."""
        return self.kind, self.text, self.whitespace

    def after_reasoning(self, opening: str, closing: str, inside: bool) -> GrammarSpec:
        """Return the grammar for an answer that may begin with a reasoning."""
        return msgspec.structs.replace(self, opening=opening, closing=closing, inside=inside)


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Structured output in vLLM's spelling; one of the first six fields is given.

    Attributes:
        json: JSON schema, as text or as an object.
        regex: regular expression.
        choice: texts of which one is the answer.
        grammar: EBNF as in llama.cpp, or Lark.
        json_object: any JSON object.
        structural_tag: structural tag, as text or as an object.
        disable_any_whitespace: JSON has no white space between its tokens.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False

    def spec(self) -> GrammarSpec:
        """Return the grammar.

        Raises:
            RequestError: none or several of the fields are given, or one has a wrong type.
        """
        given = {
            "json_schema": self.json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
            "structural_tag": self.structural_tag,
        }
        found = [(kind, value) for kind, value in given.items() if value is not None]
        if len(found) != 1:
            raise RequestError(
                "structured_outputs needs exactly one of json, regex, choice, grammar, "
                f"json_object and structural_tag, got {len(found)}",
                param="structured_outputs",
            )
        kind, value = found[0]
        made = grammar_spec(kind, value, "structured_outputs")
        if self.disable_any_whitespace:
            made = msgspec.structs.replace(made, whitespace=False)
        return made


def grammar_spec(kind: str, value: Any, param: str) -> GrammarSpec:
    """Return the grammar of a request's field.

    Args:
        kind: one of ``KINDS``, or "json_object".
        value: the field's value.
        param: name of the field, for errors.

    Raises:
        RequestError: the value has a wrong type, or is not valid JSON where it has to be.
    """
    if kind == "json_object":
        return GrammarSpec("json_schema", OBJECT)
    if kind == "json_schema" and value == ANY_JSON:
        return GrammarSpec(kind, "{}")
    if kind in ("json_schema", "structural_tag"):
        return GrammarSpec(kind, _as_json(value, param))
    if kind == "choice":
        return GrammarSpec(kind, _choices(value, param))
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param} must be a text that is not empty", param=param)
    return GrammarSpec(kind, _encodable(value, param))


def _as_json(value: Any, param: str) -> str:
    """Return ``value``, a JSON object as text or parsed, as compact JSON."""
    try:
        parsed = json_text.loads(value) if isinstance(value, str) else value
        text = json_text.dumps(parsed, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply", param=param) from None
    except (ValueError, TypeError) as error:
        raise RequestError(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(parsed, dict):
        raise RequestError(f"{param} must be a JSON object", param=param)
    return _encodable(text, param)


def _choices(value: Any, param: str) -> str:
    good = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    if not good or not any(value):
        raise RequestError(f"{param} must be a list of texts that are not empty", param=param)
    return _encodable(json_text.dumps(value, ensure_ascii=False), param)


def _encodable(text: str, param: str) -> str:
    """Return ``text``; raise RequestError if UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} is not valid Unicode", param=param) from None
    if "\0" in text:
        raise RequestError(f"{param} contains a NUL character", param=param)
    return text


def nesting(spec: GrammarSpec) -> int:
    """Return how deeply the grammar nests: objects and lists of JSON, brackets of other texts."""
    depth = deepest = 0
    quoted = escaped = False
    counts_quotes = spec.kind in ("json_schema", "structural_tag")
    for character in spec.text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == '"' and counts_quotes:
            quoted = not quoted
        elif not quoted and character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif not quoted and character in ")]}":
            depth = max(0, depth - 1)
    return deepest
