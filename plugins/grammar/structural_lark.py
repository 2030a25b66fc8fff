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
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in tag["structures"]:
        begin = one["begin"]
        trigger = next((text for text in tag["triggers"] if text and begin.startswith(text)), None)
        if trigger is None:
            raise RequestError(f"no trigger is a prefix of the tag {begin[:64]!r}")
        groups.setdefault(trigger, []).append(one)
    tokens = _Tokens(special)
    items: list[str] = []
    rules: list[str] = []
    taken: dict[int, list[str]] = {}  # the token of a trigger -> texts of triggers behind it
    for number, (trigger, structures) in enumerate(groups.items()):
        parts = tokens.split(trigger)
        at = next((i for i, part in enumerate(parts) if isinstance(part, int)), None)
        if at is None:
            rules.append(f"trigger_{number}[lazy]: TEXT {json.dumps(trigger)}")
            items.append(f"trigger_{number} tags_{number} TEXT?")
            done = len(trigger)
        else:
            # the text before the token is part of the text before the tag
            token = parts[at]
            assert isinstance(token, int)
            taken.setdefault(token, []).append("".join(map(tokens.text, parts[at + 1 :])))
            items.append(f"<[{token}]> tags_{number} TEXT?")
            done = sum(len(tokens.text(part)) for part in parts[: at + 1])
        rules += _tags(number, structures, done, tokens)
    for token, texts in taken.items():
        if all(texts):
            others = " | ".join(re.escape(text).replace("/", r"\/") + ANY for text in texts)
            rules.append(f"BEHIND_{token}: /{ANY}/ & ~/({others.replace(' | ', '|')})/")
            items.append(f"<[{token}]> BEHIND_{token}?")
    rest = sorted(set(special.values()) - taken.keys() - set(ends))
    if rest:
        items.append(f"<[{_ranges(rest)}]> TEXT?")
    # each item ends with its text: two texts side by side would be one that can be cut anywhere
    lines = [HEAD, "start: TEXT? item*", f"item: {' | '.join(items)}", *rules, f"TEXT: /{ANY}/"]
    return "\n".join(lines) + "\n"


def _tags(
    number: int, structures: Sequence[Mapping[str, Any]], done: int, tokens: _Tokens
) -> list[str]:
    """Return the rules of the tags of one trigger, whose first ``done`` characters are consumed."""
    names = [f"tag_{number}_{i}" for i in range(len(structures))]
    rules = [f"tags_{number}: {' | '.join(names)}"]
    for name, one in zip(names, structures, strict=True):
        schema = one.get("schema", {})
        content = f"%json {schema if isinstance(schema, str) else json.dumps(schema)}"
        begin = tokens.literal(one["begin"][done:])
        rules.append(f"{name}: {begin} {content} {tokens.literal(one['end'])}")
    return rules


class _Tokens:
    """The tokens that are kept apart from text."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._ids = special
        self._texts = {token: text for text, token in special.items()}
        longest = sorted(filter(None, special), key=len, reverse=True)
        self._pattern = re.compile(
            "(" + "|".join(map(re.escape, longest)) + ")" if longest else "$^"
        )

    def split(self, text: str) -> list[str | int]:
        """Return the parts of a text: tokens by their ids, and texts that are not empty."""
        parts = (part for part in self._pattern.split(text) if part)
        return [self._ids.get(part, part) for part in parts]

    def text(self, part: str | int) -> str:
        return part if isinstance(part, str) else self._texts[part]

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
