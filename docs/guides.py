"""The guide pages of the slots: written by hand, with blocks that come from code.

A block begins with ``<!-- KIND WORDS -->`` and ends with ``<!-- end -->``. Kinds: ``slot`` (its
line in the table of slots), ``members PROTOCOL ...`` (their members), ``example NAME`` (the
files that ``glowplug new-plugin`` writes under this name) and ``suite MODULE CLASS ...`` (the
members that a subclass may define, and the tests).
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docstrings import (
    class_node,
    fields_of,
    is_property,
    markdown,
    members_of,
    parse,
)

from glowplug.core import protocols
from glowplug.core.plugin.slots import BY_NAME, Slot
from glowplug.entrypoints.cli.plugin_template import files_of

BLOCK = re.compile(r"^<!-- (slot|members|example|suite)(.*?) -->\n.*?^<!-- end -->$", re.M | re.S)
SUITES = "glowplug.core.testing.suites"
Table = Callable[[tuple[str, ...], list[tuple[object, ...]]], str]


class Guides:
    """The guide pages, whose blocks are made with the generator's function for tables."""

    def __init__(self, docs: Path, table: Table) -> None:
        self._table = table
        self._pages = {f"guide/{name}.md": docs / "guide" / f"{name}.md" for name in BY_NAME}

    def all(self) -> dict[str, Callable[[], str]]:
        """Return the pages: path in docs -> function that makes it."""
        return {name: lambda path=path: self.refreshed(path) for name, path in self._pages.items()}

    def refreshed(self, path: Path) -> str:
        """Return the text of a page with its blocks made anew."""
        slot = BY_NAME[path.stem]
        kinds: dict[str, Callable[[Slot, list[str]], str]] = {
            "slot": self._slot,
            "members": self._members,
            "example": self._example,
            "suite": self._suite,
        }

        def block(match: re.Match[str]) -> str:
            kind, words = match.group(1), match.group(2).split()
            text = kinds[kind](slot, words).strip("\n")
            return f"<!-- {' '.join((kind, *words))} -->\n\n{text}\n\n<!-- end -->"

        return BLOCK.sub(block, path.read_text(encoding="utf-8"))

    def _slot(self, slot: Slot, words: list[str]) -> str:
        section = f"`[{slot.section}]`" if slot.section else "none: the architecture chooses"
        return self._table(
            ("hook", "section", "default", "offers", "protocol"),
            [
                (
                    f"[`{slot.hook}`](../hooks.md#{slot.hook})",
                    section + (", a list" if slot.many else ""),
                    f"`{slot.default}`",
                    f"[`{slot.offers}`](../reference/components.md#{slot.offers.lower()})",
                    f"[`{slot.protocol}`](../hooks.md#{slot.protocol.lower()})",
                )
            ],
        )

    def _members(self, slot: Slot, words: list[str]) -> str:
        parts = []
        for name in words:
            protocol = getattr(protocols, name)
            if len(words) > 1:
                page = "../hooks.md" if name == slot.protocol else "../reference/steps.md"
                parts.append(f"[`{name}`]({page}#{name.lower()}):\n")
            parts.append(self._table(("member", "duty"), member_rows(protocol)))
        return "\n".join(parts)

    def _example(self, slot: Slot, words: list[str]) -> str:
        (name,) = words
        files = files_of(slot, name)
        shown = (f"src/glowplug_{name}/plugin.py", f"src/glowplug_{name}/runtime.py")
        folder = f"glowplug-{name.replace('_', '-')}"
        parts = [
            f"`{folder}/{path}`:\n\n```python\n{files[path].strip()}\n```\n"
            for path in (*shown, f"tests/test_{name}.py")
        ]
        return "\n".join(parts)

    def _suite(self, slot: Slot, words: list[str]) -> str:
        module = importlib.import_module(f"{SUITES}.{words[0]}")
        parts = []
        for name in words[1:]:
            suite = getattr(module, name)
            supplied = [row for kind in reversed(_kinds(suite)) for row in suite_rows(kind)]
            rows = list(dict(supplied).items())
            tests = [test for kind in reversed(_kinds(suite)) for test in _tests(kind)]
            parts.append(f"`{name}` of `{module.__name__}` takes these members from your class:\n")
            parts.append(self._table(("member", "meaning"), rows))
            parts.append(f"Its tests: {', '.join(f'`{test}`' for test in dict.fromkeys(tests))}.\n")
        return "\n".join(parts)


def member_rows(protocol: type) -> list[tuple[object, ...]]:
    """Return (member, duty) of each member of a protocol."""
    kinds = [one for one in protocol.__mro__ if one.__module__.startswith(protocols.__name__)]
    rows: dict[str, str] = {}
    for kind in reversed(kinds):
        rows |= {f"`{one.name}`": markdown(one.text) for one in fields_of(kind)}
        for node in members_of(kind):
            arguments = [one.arg for one in node.args.args if one.arg not in ("self", "cls")]
            call = node.name if is_property(node) else f"{node.name}({', '.join(arguments)})"
            text = parse(ast.get_docstring(node)).text.partition("\n\n")[0]
            rows[f"`{call}`"] = markdown(" ".join(text.split()))
    return list(rows.items())


def suite_rows(suite: type) -> list[tuple[object, ...]]:
    """Return (member, meaning) of each member of a suite that a subclass has to or may define."""
    rows: list[tuple[object, ...]] = [
        (f"`{name}`", markdown(text))
        for name, text in parse(suite.__doc__).entries("Attributes").items()
    ]
    for node in class_node(suite)[0].body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("test_", "_", "check_")):
            continue
        if any("fixture" in ast.unparse(mark) for mark in node.decorator_list):
            continue
        text = parse(ast.get_docstring(node)).text.partition("\n\n")[0]
        required = "NotImplementedError" in ast.unparse(node)
        if required and text:
            arguments = ", ".join(one.arg for one in node.args.args[1:])
            rows.append((f"`{node.name}({arguments})`", markdown(" ".join(text.split()))))
    return rows


def _kinds(suite: type) -> list[Any]:
    """Return a suite's class and its bases in ``core.testing``."""
    return [one for one in suite.__mro__ if one.__module__.startswith("glowplug.core.testing")]


def _tests(suite: type) -> list[str]:
    """Return the names of the tests that a class itself has."""
    body = class_node(suite)[0].body
    return [node.name for node in body if getattr(node, "name", "").startswith("test_")]
