"""Classes and functions as Markdown: fields, signatures and docstrings, read from their source."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
#: methods whose names begin with two underscores and that are shown
SHOWN = frozenset({"__init__", "__call__"})
#: an entry of a section: names, with ``*`` for keywords, and the beginning of the text
ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): ?(.*)$")


@dataclass(frozen=True)
class Docstring:
    """A docstring in parts.

    Attributes:
        text: everything before the first section.
        sections: (title, indented text) of each section.
    """

    text: str
    sections: tuple[tuple[str, str], ...]

    def entries(self, title: str) -> dict[str, str]:
        """Return the entries of a section: name -> text; {} without the section."""
        found: dict[str, str] = {}
        for _, text in (one for one in self.sections if one[0] == title):
            names: list[str] = []
            for line in text.splitlines():
                match = None if line.startswith(" ") else ENTRY.match(line)
                if match:
                    names = match.group(1).split(", ")
                    found |= dict.fromkeys(names, match.group(2))
                else:
                    found |= {name: f"{found[name]} {line.strip()}".rstrip() for name in names}
        return {name.lstrip("*"): text.strip() for name, text in found.items()}


@dataclass(frozen=True)
class Field:
    """A field of a class.

    Attributes:
        name: its name.
        type: its annotation, as in the source.
        default: the default, as in the source; "" for a required field.
        text: its description; "" if there is none.
    """

    name: str
    type: str
    default: str
    text: str


def parse(text: str | None) -> Docstring:
    """Return a docstring in parts; an empty one for None."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", inspect.cleandoc(text or ""), flags=re.M)
    sections = []
    for title, body in zip(parts[1::2], parts[2::2]):
        indented = re.match(r"(?:(?: .*)?\n?)*", body)
        sections.append((title, textwrap.dedent(indented.group() if indented else "").strip()))
    return Docstring(parts[0].strip(), tuple(sections))


def markdown(text: str) -> str:
    """Return text of a docstring as Markdown."""
    text = re.sub(r":(?:class|func|meth|data|attr):`~?([^`]+)`", r"`\1`", text)
    text = text.replace("``", "`")
    return re.sub(r"::$", ":", text, flags=re.M)


def docstring_lines(text: str | None, skip: tuple[str, ...] = ()) -> list[str]:
    """Return a docstring as lines of Markdown, without the sections in ``skip``."""
    found = parse(text)
    paragraphs = [one for one in found.text.split("\n\n") if not one.startswith("NOTE: ")]
    lines = [markdown("\n\n".join(paragraphs)), ""] if found.text else []
    for title, body in found.sections:
        if title in skip:
            continue
        entries = found.entries(title) if title in ("Args", "Attributes", "Raises") else {}
        if entries:
            lines += [f"{title}:", ""]
            lines += [f"- `{name}`: {markdown(said)}" for name, said in entries.items()]
        else:
            lines.append(f"{title}: {markdown(' '.join(body.split()))}")
        lines.append("")
    return lines


# ---- source --------------------------------------------------------------------------------------


@cache
def module_of(path: str) -> tuple[ast.Module, tuple[str, ...]]:
    """Return the syntax tree and the lines of a file."""
    text = Path(path).read_text(encoding="utf-8")
    return ast.parse(text), tuple(text.splitlines())


def _comment(lines: tuple[str, ...], node: ast.stmt) -> str:
    """Return the ``#:`` comment behind a statement or in the lines above it."""
    behind = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
    if "#:" in behind:
        return behind.split("#:", 1)[1].strip()
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#:"):
            break
        above.insert(0, line.strip().removeprefix("#:").strip())
    return " ".join(above)


def class_node(thing: type) -> tuple[ast.ClassDef, tuple[str, ...]]:
    """Return the syntax tree of a class, and the lines of its file."""
    module, lines = module_of(inspect.getsourcefile(thing) or "")
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == thing.__qualname__.split(".")[-1]:
            return node, lines
    raise LookupError(thing.__qualname__)


def constant(path: str, name: str) -> tuple[str, str]:
    """Return (value, ``#:`` comment) of an assignment at a module's top, from its source.

    Raises:
        LookupError: the module has no such assignment.
    """
    module, lines = module_of(path)
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            value = getattr(node, "value", None)
            return ast.unparse(value) if value is not None else "", _comment(lines, node)
    raise LookupError(f"{path}: {name}")


# ---- fields --------------------------------------------------------------------------------------


def _default(value: ast.expr | None) -> str:
    """Return the default of a field, as it is after construction."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        made = keywords.get("default_factory")
        if isinstance(made, ast.Lambda):
            return ast.unparse(made.body)
        if made is not None:
            text = ast.unparse(made)
            return {"list": "[]", "dict": "{}"}.get(text, f"{text}()")
        return ast.unparse(keywords["default"]) if "default" in keywords else ""
    return ast.unparse(value)


def fields_of(thing: type) -> list[Field]:
    """Return the public fields that a class itself declares, in order."""
    if issubclass(thing, Enum):
        node, lines = class_node(thing)
        assigned = [one for one in node.body if isinstance(one, ast.Assign)]
        return [
            Field(ast.unparse(one.targets[0]), "", ast.unparse(one.value), _comment(lines, one))
            for one in assigned
        ]
    node, lines = class_node(thing)
    told = parse(thing.__doc__).entries("Attributes")
    found = []
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            name = one.target.id
            if not name.startswith("_"):
                text = told.pop(name, "") or _comment(lines, one)
                found.append(Field(name, ast.unparse(one.annotation), _default(one.value), text))
    own = {getattr(one, "name", "") for one in node.body}
    found += [Field(name, "", "", text) for name, text in told.items() if name not in own]
    return found


# ---- members -------------------------------------------------------------------------------------


def members_of(thing: type) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the public methods and properties that a class itself declares."""
    for node in class_node(thing)[0].body:
        if isinstance(node, FUNCTION) and (node.name in SHOWN or not node.name.startswith("_")):
            yield node


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a member is read like a field."""
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    return any(mark in ("property", "cached_property") for mark in marks)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str = "") -> str:
    """Return the call of a function with types, one argument a line if it is long."""
    arguments = _arguments(node.args)
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    start = "async def " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{start}{name or node.name}({', '.join(arguments)}){result}"
    if len(line) <= 100:
        return line
    inside = ",\n    ".join(arguments)
    return f"{start}{name or node.name}(\n    {inside},\n){result}"


def _arguments(found: ast.arguments) -> list[str]:
    """Return the arguments of a function with types and defaults, without ``self``."""
    plain = [*found.posonlyargs, *found.args]
    defaults = [None] * (len(plain) - len(found.defaults)) + list(found.defaults)
    result = [_argument(one, default) for one, default in zip(plain, defaults)]
    if found.posonlyargs:
        result.insert(len(found.posonlyargs), "/")
    if found.vararg or found.kwonlyargs:
        result.append("*" + (_argument(found.vararg, None) if found.vararg else ""))
    result += [_argument(*pair) for pair in zip(found.kwonlyargs, found.kw_defaults)]
    result += ["**" + _argument(found.kwarg, None)] if found.kwarg else []
    return [one for one in result if one not in ("self", "cls")]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
    return text + (f" = {ast.unparse(default)}" if default is not None else "")


# ---- entries -------------------------------------------------------------------------------------

Table = Callable[[tuple[str, ...], list[tuple[object, ...]]], str]
Rows = Callable[[Any, frozenset[str]], list[tuple[object, ...]]]


def field_table(thing: type, table: Table, option_rows: Rows) -> str:
    """Return the table of a class's own fields; "" if it has none."""
    if issubclass(thing, BaseModel):
        base = thing.__mro__[1]
        rows = option_rows(thing, frozenset(getattr(base, "model_fields", ())) | {"use"})
        return table(("option", "type", "default", "meaning"), rows) if rows else ""
    found = fields_of(thing)
    if not found:
        return ""
    if issubclass(thing, Enum):
        values = [(f"`{one.name}`", f"`{one.default}`", markdown(one.text)) for one in found]
        return table(("member", "value", "meaning"), list(values))
    typed: list[tuple[object, ...]] = [
        (
            f"`{one.name}`",
            f"`{one.type}`" if one.type else "",
            f"`{one.default}`" if one.default else "",
            markdown(one.text),
        )
        for one in found
    ]
    empty = [column for column in (2, 1) if not any(row[column] for row in typed)]
    head = ["field", "type", "default", "meaning"]
    for column in empty:
        del head[column]
        typed = [row[:column] + row[column + 1 :] for row in typed]
    return table(tuple(head), typed)


def class_entry(thing: type, table: Table, option_rows: Rows) -> str:
    """Return the section of a class: docstring, fields, properties and methods."""
    name = thing.__name__
    lines = [f"### `{name}`", "", f"`from {public_module(thing)} import {name}`", ""]
    lines += docstring_lines(thing.__doc__, ("Attributes",))
    bases = [one for one in thing.__mro__[1:] if one.__module__.startswith("glowplug.")]
    if bases:
        lines += [f"Derived from `{bases[0].__name__}`.", ""]
    lines += [field_table(thing, table, option_rows), ""]
    for node in members_of(thing):
        text = ast.get_docstring(node)
        if node.name == "__init__":
            if not issubclass(thing, BaseException):
                lines += [f"```py\n{signature(node, name)}\n```", "", *docstring_lines(text)]
        elif is_property(node):
            kind = ast.unparse(node.returns) if node.returns else ""
            said = markdown(" ".join((text or "").split()))
            lines += [f"- `{name}.{node.name}: {kind}`" + (f": {said}" if said else ""), ""]
        elif text:
            lines += [f"```py\n{signature(node)}\n```", "", *docstring_lines(text)]
    return "\n".join(lines)


def function_entry(thing: Any) -> str:
    """Return the section of a function."""
    module, _ = module_of(inspect.getsourcefile(thing) or "")
    (node,) = [
        one for one in module.body if isinstance(one, FUNCTION) and one.name == thing.__name__
    ]
    name = thing.__name__
    lines = [f"### `{name}`", "", f"`from {public_module(thing)} import {name}`", ""]
    return "\n".join(
        [*lines, f"```py\n{signature(node)}\n```", "", *docstring_lines(thing.__doc__)]
    )


def public_module(thing: Any) -> str:
    """Return the module from which a class or function is imported."""
    import glowplug
    from glowplug.core import api, protocols

    for module in (glowplug, api, protocols):
        if getattr(module, thing.__name__, None) is thing:
            return module.__name__
    return str(thing.__module__)
