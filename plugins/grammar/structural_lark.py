"""Structural tags as grammars of llguidance.

llguidance keeps added tokens, such as "</think>", apart from text: a text never matches such a
token, and a tag that a model writes as one token has to be stated by its id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glowplug.core.errors import RequestError
from glowplug.plugins.grammar.lark_forms import ANY, Forms, Tokens

HEAD = "%llguidance {}"


def structural_lark(tag: Mapping[str, Any], special: Mapping[str, int], ends: Iterable[int]) -> str:
    """Return the grammar of a structural tag, in Lark.

    Args:
        tag: structural tag with ``format``, or with ``structures`` (begin, schema, end) and
            ``triggers``: any text with tags, whose contents match schemas.
        special: id of each token that is kept apart from text, by its text.
        ends: ids that end a sequence.

    Raises:
        RequestError: the library has no such form, or a tag begins with none of the triggers.
    """
    forms = Forms(Tokens(special))
    form = tag["format"] if "format" in tag else _triggered(tag)
    if form.get("type") == "triggered_tags":
        start = _text_with_tags(form, forms, special, ends)
    else:
        start = [f"start: {forms.expression(form)}"]
    return "\n".join([HEAD, *start, *forms.rules, f"TEXT: /{ANY}/"]) + "\n"


def _triggered(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of a structural tag with ``structures`` and ``triggers``."""
    if not tag.get("structures") or not tag.get("triggers"):
        raise RequestError("a structural tag needs format, or structures and triggers")
    tags = [
        {
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one["end"],
        }
        for one in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _text_with_tags(
    form: Mapping[str, Any], forms: Forms, special: Mapping[str, int], ends: Iterable[int]
) -> list[str]:
    """Return the first rules of the grammar of any text with tags.

    ``special`` and ``ends``: see :func:`structural_lark`.
    """
    if form.get("at_least_one") or form.get("stop_after_first") or form.get("excludes"):
        raise RequestError(
            "llguidance supports triggered_tags without at_least_one, stop_after_first and "
            'excludes only; they need grammar.use = "xgrammar"'
        )
    made = _Items(forms)
    for trigger, tags in _by_trigger(form).items():
        made.add(trigger, tags)
    made.add_texts_behind_tokens()
    rest = sorted(set(special.values()) - made.taken.keys() - set(ends))
    if rest:
        made.items.append(f"<[{_ranges(rest)}]> TEXT?")
    # each item ends with its text: two texts side by side would be one that can be cut anywhere
    return ["start: TEXT? item*", f"item: {' | '.join(made.items)}"]


def _by_trigger(form: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the tags of a form by the trigger with which each begins."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in form["tags"]:
        begin = one["begin"]
        trigger = next((text for text in form["triggers"] if text and begin.startswith(text)), None)
        if trigger is None:
            raise RequestError(f"no trigger is a prefix of the tag {begin[:64]!r}")
        groups.setdefault(trigger, []).append(one)
    return groups


class _Items:
    """The parts of a text with tags; they grow by triggers.

    Attributes:
        items: expressions of a tag or a token, each with the text behind it.
        taken: token with which a trigger begins -> texts of triggers behind the token.
    """

    def __init__(self, forms: Forms) -> None:
        self.items: list[str] = []
        self.taken: dict[int, list[str]] = {}
        self._forms = forms

    def add(self, trigger: str, tags: Sequence[Mapping[str, Any]]) -> None:
        """Add the tags of a trigger.

        Text of the trigger before its first token is part of the text before the tag.
        """
        forms = self._forms
        token, behind = forms.tokens.first(trigger)
        if token is None:
            found = forms.rule(f"TEXT {forms.tokens.quoted(trigger)}", lazy=True)
            done = len(trigger)
        else:
            self.taken.setdefault(token, []).append(behind)
            found = f"<[{token}]>"
            done = len(trigger) - len(behind)
        each = [forms.rule(forms.tag(one, skip=done)) for one in tags]
        self.items.append(f"{found} {forms.rule(' | '.join(each))} TEXT?")

    def add_texts_behind_tokens(self) -> None:
        """Allow other texts behind the tokens with which triggers begin, unless they end there."""
        for token, texts in self.taken.items():
            if all(texts):
                others = "|".join(re.escape(text).replace("/", r"\/") + ANY for text in texts)
                self._forms.rules.append(f"BEHIND_{token}: /{ANY}/ & ~/({others})/")
                self.items.append(f"<[{token}]> BEHIND_{token}?")


def _ranges(ids: Sequence[int]) -> str:
    """Return sorted ids as ranges: "2-8,10"."""
    runs: list[list[int]] = []
    for one in ids:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
