"""Options as a TOML file, with the source of each value as a comment.

The standard library reads TOML but does not write it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from glowplug.core.plan.resolved import ResolvedOption

COMMENT_COLUMN = 44  #: column of comments, where the value leaves room


def to_toml(options: Iterable[ResolvedOption]) -> str:
    """Return the options as a TOML file, which ``--config`` reads.

    An option without a value is written as a comment, since TOML has no null.
    """
    lines: list[str] = []
    ordered = sorted(options, key=lambda option: "." in option.path)  # the top level first
    for section, held in groupby(ordered, key=lambda option: option.path.rpartition(".")[0]):
        if section:
            lines += ["", _header(section)]
        for option in held:
            name = option.path.rpartition(".")[2]
            text = f"# {name} = null" if option.value is None else f"{name} = {value(option.value)}"
            lines.append(f"{text:<{COMMENT_COLUMN}} # {' '.join(option.source.split())}")
    return "\n".join(lines) + "\n"


def _header(section: str) -> str:
    """Return the header of a section; the numbered item of a list has two brackets."""
    name, _, number = section.rpartition(".")
    return f"[[{name}]]" if number.isdigit() else f"[{section}]"


def value(item: Any) -> str:
    """Return a value in TOML; JSON's strings, numbers and booleans are written the same there."""
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(value, item))}]"
    if isinstance(item, dict):
        return (
            "{" + ", ".join(f"{json.dumps(key)} = {value(one)}" for key, one in item.items()) + "}"
        )
    if isinstance(item, str):
        return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(item)
