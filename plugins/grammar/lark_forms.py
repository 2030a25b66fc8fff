"""Forms of structural tags as expressions of llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from glowplug.core.errors import RequestError

ANY = r"(.|\n)*"
#: white space between two tokens of JSON; bounded, so that an answer cannot consist of it
WHITESPACE = r"\r?\n[ \t]{0,32}|[ \t]{1,32}"
_SLASH = re.compile(r"\\.|[/\n]", re.DOTALL)
_COUNTS = {"optional": "?", "star": "*", "plus": "+"}


class Forms:
    """A writer of expressions, with the rules to which the expressions refer.

    Attributes:
        tokens: the tokens that are kept apart from text.
        rules: the rules so far.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.rules: list[str] = []

    def rule(self, expression: str, *, lazy: bool = False) -> str:
        """Add a rule and return its name. ``lazy``: the rule ends as early as it can."""
        name = f"form_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name

    def expression(self, form: Mapping[str, Any]) -> str:
        """Return the expression of a form; it may stand beside others.

        Raises:
            RequestError: the library has no such form.
        """
        kind = form.get("type")
        if kind == "const_string":
            return self.tokens.literal(form["value"]) or '""'
        if kind == "json_schema" and form.get("style", "json") == "json":
            return json_expression(form["json_schema"])
        if kind == "regex":
            return self._terminal(_SLASH.sub(_escape, form["pattern"]))
        if kind == "sequence":
            return " ".join(map(self.expression, form["elements"])) or '""'
        if kind == "or":
            return self.rule(" | ".join(map(self.expression, form["elements"])))
        if kind in _COUNTS:
            return f"({self.expression(form['content'])}){_COUNTS[kind]}"
        if kind == "tag":
            return self.tag(form)
        if kind == "tags_with_separator":
            return self._tags(form)
        raise RequestError(
            f"llguidance supports no structural tags with the form {str(kind)[:64]!r} at this "
            'place; they need grammar.use = "xgrammar"'
        )

    def tag(self, form: Mapping[str, Any], *, skip: int = 0) -> str:
        """Return the expression of a tag without its first ``skip`` characters."""
        end = form["end"]
        if not isinstance(form["begin"], str) or not isinstance(end, str):
            raise RequestError(
                "llguidance supports tags with one text as begin and one as end only; others need "
                'grammar.use = "xgrammar"'
            )
        begin = self.tokens.literal(form["begin"][skip:])
        content = form["content"]
        if content.get("type") == "any_text":
            return f"{begin} {self._text_until(end, content.get('excludes', []))}"
        return f"{begin} {self.expression(content)} {self.tokens.literal(end)}"

    def _tags(self, form: Mapping[str, Any]) -> str:
        """Return the expression of tags with a separator between them."""
        one = self.rule(" | ".join(self.rule(self.tag(tag)) for tag in form["tags"]))
        found = one
        if not form.get("stop_after_first"):
            found = f"{one} ({self.tokens.literal(form['separator'])} {one})*"
        return found if form.get("at_least_one") else f"({found})?"

    def _text_until(self, end: str, excluded: Sequence[str]) -> str:
        """Return the expression of any text up to and including the first ``end``.

        ``excluded``: texts that the text does not contain.
        """
        token, behind = self.tokens.first(end)
        if token is None:
            text = self._terminal(ANY, excluded) if excluded else "TEXT"
            return self.rule(f"{text} {self.tokens.quoted(end)}", lazy=True)
        before = end.partition(self.tokens.text(token))[0]
        text = self._terminal(f"{ANY}{_escaped(before)}", [end, *excluded])
        return f"{text} <[{token}]> {self.tokens.literal(behind)}"

    def _terminal(self, pattern: str, excluded: Sequence[str] = ()) -> str:
        """Add a terminal and return its name.

        Args:
            pattern: regular expression, within slashes.
            excluded: texts that the terminal's text does not contain.
        """
        name = f"FORM_{len(self.rules)}"
        others = "|".join(map(_escaped, excluded))
        without = f" & ~/{ANY}({others}){ANY}/" if excluded else ""
        self.rules.append(f"{name}: /{pattern}/{without}")
        return name


def json_expression(schema: Any) -> str:
    """Return the expression of a JSON value that matches a schema."""
    if isinstance(schema, Mapping):
        bounded = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
        schema = {"x-guidance": bounded, **schema}
    return f"%json {schema if isinstance(schema, str) else json.dumps(schema)}"


def _escape(found: re.Match[str]) -> str:
    """Return a slash or a line break as it stands within slashes; other matches as they are."""
    return {"/": r"\/", "\n": r"\n"}.get(found.group(), found.group())


def _escaped(text: str) -> str:
    """Return the regular expression of a text, within slashes."""
    return re.escape(text).replace("/", r"\/")


class Tokens:
    """The tokens that are kept apart from text.

    Args:
        ids: id of each token, by its text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._texts = {token: text for text, token in ids.items()}
        longest = sorted(filter(None, ids), key=len, reverse=True)
        self._pattern = re.compile(
            "(" + "|".join(map(re.escape, longest)) + ")" if longest else "$^"
        )

    def text(self, token: int) -> str:
        """Return the text of a token."""
        return self._texts[token]

    def first(self, text: str) -> tuple[int | None, str]:
        """Return the first token of a text and the text behind it; None and "" without one."""
        found = self._pattern.search(text)
        if found is None:
            return None, ""
        return self._ids[found.group()], text[found.end() :]

    def literal(self, text: str) -> str:
        """Return the expression of a text."""
        parts = [part for part in self._pattern.split(text) if part]
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else self.quoted(part) for part in parts
        )

    def quoted(self, text: str) -> str:
        """Return the expression of a text without such tokens."""
        return json.dumps(text, ensure_ascii=False)
