"""Structural tags as xgrammar takes them.

A special token has no text in xgrammar: a text never matches such a token, and a tag that a model
writes as one special token has to be stated by its id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Form = dict[str, Any]


def structural_tag(tag: Form, special: Mapping[str, int], whitespace: int) -> Form:
    """Return a structural tag with ``format``, in which special tokens have their ids.

    Args:
        tag: structural tag with ``format``, or with ``structures`` and ``triggers``.
        special: id of each special token, by its text.
        whitespace: most characters of white space between two tokens of JSON.
    """
    if "structures" in tag:
        tags = [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
                "end": one["end"],
            }
            for one in tag["structures"]
        ]
        form: Form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        tag = {"type": "structural_tag", "format": form}
    return {**tag, "format": _Forms(special, whitespace).form(tag["format"])}


class _Forms:
    """A converter of forms."""

    def __init__(self, special: Mapping[str, int], whitespace: int) -> None:
        self._special = special
        self._whitespace = whitespace
        longest = sorted(filter(None, special), key=len, reverse=True)
        self._pattern = re.compile(
            "(" + "|".join(map(re.escape, longest)) + ")" if longest else "$^"
        )

    def form(self, form: Any) -> Any:
        """Return a form with bounded white space and the ids of special tokens."""
        if not isinstance(form, dict):
            return form
        kind = form.get("type")
        if kind == "json_schema":
            return {"max_whitespace_cnt": self._whitespace, **form}
        if kind == "const_string":
            return _sequence(self._parts(form["value"]))
        made = dict(form)
        for key in ("elements", "tags"):
            if key in made:
                made[key] = [self.form(one) for one in made[key]]
        if "content" in made:
            made["content"] = self.form(made["content"])
        if kind == "tag":
            return self._tag(made)
        return self._triggered(made) if kind == "triggered_tags" else made

    def _tag(self, form: Form) -> Form:
        """Return a tag whose begin and end are each a text or a token."""
        begin, end = form["begin"], form["end"]
        if isinstance(begin, str):
            first, *more = self._parts(begin)
            content = _sequence([*more, form["content"]])
            form = {**form, "begin": _border(first), "content": content}
        if isinstance(end, str):
            *more, last = self._parts(end)
            content = _sequence([form["content"], *more])
            form = {**form, "content": content, "end": _border(last)}
        return form

    def _triggered(self, form: Form) -> Form:
        """Return triggered tags whose triggers are tokens, if all of them are."""
        ids = [self._special.get(trigger) for trigger in form["triggers"]]
        if not ids or None in ids or form.get("excludes"):
            return form
        rest = {key: value for key, value in form.items() if key not in ("triggers", "excludes")}
        return {**rest, "type": "token_triggered_tags", "trigger_tokens": ids}

    def _parts(self, text: str) -> list[Form]:
        """Return the forms of a text: at least one, texts and tokens."""
        parts = [part for part in self._pattern.split(text) if part] or [""]
        return [
            {"type": "token", "token": self._special[part]}
            if part in self._special
            else {"type": "const_string", "value": part}
            for part in parts
        ]


def _border(form: Form) -> str | Form:
    """Return the begin or the end of a tag."""
    return form if form["type"] == "token" else str(form["value"])


def _sequence(forms: list[Form]) -> Form:
    """Return the form of one form behind the other."""
    return forms[0] if len(forms) == 1 else {"type": "sequence", "elements": forms}
