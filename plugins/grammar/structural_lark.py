"""Structural tags as grammars of llguidance.

llguidance keeps added tokens, such as "</think>", apart from text: a text never matches such a
token, and a tag that a model writes as one token has to be stated by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glowplug.core.errors import RequestError

HEAD = "%llguidance {}"
ANY = r"(.|\n)*"


def structural_lark(tag: Mapping[str, Any], special: Mapping[str, int], ends: Iterable[int]) -> str:
    """Return the grammar of any text with tags, whose contents match schemas, in Lark.

    Args:
        tag: structural tag with ``structures`` (begin, schema, end) and ``triggers``.
        special: id of each token that is kept apart from text, by its text.
        ends: ids that end a sequence.

    Raises:
        RequestError: a tag begins with none of the triggers.
    """
    made = _Grammar(_Tokens(special))
    for trigger, structures in _by_trigger(tag).items():
        made.add(trigger, structures)
    made.add_texts_behind_tokens()
    rest = sorted(set(special.values()) - made.taken.keys() - set(ends))
    if rest:
        made.items.append(f"<[{_ranges(rest)}]> TEXT?")
    # each item ends with its text: two texts side by side would be one that can be cut anywhere
    items = " | ".join(made.items)
    lines = [HEAD, "start: TEXT? item*", f"item: {items}", *made.rules, f"TEXT: /{ANY}/"]
    return "\n".join(lines) + "\n"


def _by_trigger(tag: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the structures of a tag by the trigger with which each begins."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in tag["structures"]:
        begin = one["begin"]
        trigger = next((text for text in tag["triggers"] if text and begin.startswith(text)), None)
        if trigger is None:
            raise RequestError(f"no trigger is a prefix of the tag {begin[:64]!r}")
        groups.setdefault(trigger, []).append(one)
    return groups


class _Grammar:
    """A grammar that grows by triggers.

    Attributes:
        items: expressions of a tag or a token, each with the text behind it.
        rules: the rules to which the expressions refer.
        taken: token with which a trigger begins -> texts of triggers behind the token.
    """

    def __init__(self, tokens: _Tokens) -> None:
        self.items: list[str] = []
        self.rules: list[str] = []
        self.taken: dict[int, list[str]] = {}
        self._tokens = tokens

    def add(self, trigger: str, structures: Sequence[Mapping[str, Any]]) -> None:
        """Add the tags of a trigger.

        Text of the trigger before its first token is part of the text before the tag.
        """
        name = f"tags_{len(self.items)}"
        token, behind = self._tokens.first(trigger)
        if token is None:
            self.rules.append(f"{name}_trigger[lazy]: TEXT {json.dumps(trigger)}")
            self.items.append(f"{name}_trigger {name} TEXT?")
            done = len(trigger)
        else:
            self.taken.setdefault(token, []).append(behind)
            self.items.append(f"<[{token}]> {name} TEXT?")
            done = len(trigger) - len(behind)
        each = [f"{name}_{i}" for i in range(len(structures))]
        self.rules.append(f"{name}: {' | '.join(each)}")
        self.rules += [
            f"{rule}: {self._tag(one, done)}" for rule, one in zip(each, structures, strict=True)
        ]

    def _tag(self, structure: Mapping[str, Any], done: int) -> str:
        """Return the expression of a tag whose first ``done`` characters are consumed."""
        schema = structure.get("schema", {})
        content = schema if isinstance(schema, str) else json.dumps(schema)
        literal = self._tokens.literal
        return f"{literal(structure['begin'][done:])} %json {content} {literal(structure['end'])}"

    def add_texts_behind_tokens(self) -> None:
        """Allow other texts behind the tokens with which triggers begin, unless they end there."""
        for token, texts in self.taken.items():
            if all(texts):
                others = "|".join(re.escape(text).replace("/", r"\/") + ANY for text in texts)
                self.rules.append(f"BEHIND_{token}: /{ANY}/ & ~/({others})/")
                self.items.append(f"<[{token}]> BEHIND_{token}?")


class _Tokens:
    """The tokens that are kept apart from text."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._ids = special
        longest = sorted(filter(None, special), key=len, reverse=True)
        self._pattern = re.compile(
            "(" + "|".join(map(re.escape, longest)) + ")" if longest else "$^"
        )

    def split(self, text: str) -> list[str | int]:
        """Return the parts of a text: tokens by their ids, and texts that are not empty."""
        parts = (part for part in self._pattern.split(text) if part)
        return [self._ids.get(part, part) for part in parts]

    def first(self, text: str) -> tuple[int | None, str]:
        """Return the first token of a text and the text behind it; None and "" without one."""
        found = self._pattern.search(text)
        if found is None:
            return None, ""
        return self._ids[found.group()], text[found.end() :]

    def literal(self, text: str) -> str:
        """Return the Lark expression of a text."""
        return " ".join(
            json.dumps(part, ensure_ascii=False) if isinstance(part, str) else f"<[{part}]>"
            for part in self.split(text)
        )


def _ranges(ids: Sequence[int]) -> str:
    """Return sorted ids as ranges: "2-8,10"."""
    runs: list[list[int]] = []
    for one in ids:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
