"""Files of a new plugin distribution, from the templates of its slot. No torch.

A template has the files of a distribution, each behind a line ``==> PATH``. ``common.txt`` has
those of every slot; the template of a slot has the two modules and the tests.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

from glowplug import __version__
from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.component import CONTRACT
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.plugin.slots import BY_NAME, Slot

TEMPLATES = Path(__file__).parent / "templates"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
LONGEST_NAME = 32  #: characters
RESERVED = frozenset({"auto", "none", "true", "false"})  #: values of ``use`` with another meaning
FILE = re.compile(r"^==> (.+)\n", re.MULTILINE)


class NewPluginError(GlowplugError):
    """A distribution cannot be written: its slot, name or folder is refused."""


def find_slot(name: str) -> Slot:
    """Return the slot called ``name``.

    Raises:
        NewPluginError: there is no such slot.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    close = difflib.get_close_matches(name, BY_NAME, 1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    raise NewPluginError(f"unknown slot {name!r}{hint}; slots: {', '.join(sorted(BY_NAME))}")


def check_name(name: str, slot: Slot, plugins: PluginSet) -> None:
    """Check that a component of ``slot`` can have the name ``name``.

    Raises:
        NewPluginError: the name is not made of words, is reserved, or is that of a built-in
            component of the slot.
    """
    if not NAME.fullmatch(name):
        words = "_".join(re.findall(r"[a-z0-9]+", name.lower()))
        hint = f", for example {words!r}" if NAME.fullmatch(words) else ""
        raise NewPluginError(
            f"bad name {name!r}: use lower-case words of letters and digits, joined by _{hint}"
        )
    if len(name) > LONGEST_NAME:
        raise NewPluginError(f"the name {name!r} is longer than {LONGEST_NAME} characters")
    if name in RESERVED or keyword.iskeyword(name):
        raise NewPluginError(f"the name {name!r} is reserved; choose another one")
    if name in names_in(slot, plugins):
        raise NewPluginError(
            f"{slot.name} has a built-in component called {name!r}; choose another name, "
            f"for example 'my_{name}'"
        )


def names_in(slot: Slot, plugins: PluginSet) -> set[str]:
    """Return the names and aliases of the components of a slot."""
    names: set[str] = set()
    for found in plugins.components(slot.name):
        names |= {found.component.name, *getattr(found.component.offers, "aliases", ())}
    return names


def files_of(slot: Slot, name: str) -> dict[str, str]:
    """Return the files of a distribution with a component ``name``: path to text.

    Raises:
        NewPluginError: a class would have the name of another one in its module.
    """
    package = f"glowplug_{name}"
    use = f"'{slot.name}=[{{use = \"{name}\"}}]'" if slot.many else f"{slot.section}.use={name}"
    values = {
        "name": name,
        "slot": slot.name,
        "protocol": slot.protocol,
        "package": package,
        "distribution": package.replace("_", "-"),
        "Camel": "".join(word.capitalize() for word in name.split("_")),
        "contract": str(CONTRACT),
        "version": __version__,
        "usage": f"glowplug check --set {use}" if slot.section else "glowplug check --model FOLDER",
    }
    paths = {
        "plugin.py": f"src/{package}/plugin.py",
        "runtime.py": f"src/{package}/runtime.py",
        "test.py": f"tests/test_{name}.py",
    }
    found = {}
    for template in ("common", slot.name):
        for path, text in _sections(template).items():
            path = Template(paths.get(path, path)).substitute(values)
            found[path] = Template(text).substitute(values)
    for path, text in found.items():
        if path.endswith(".py"):
            _check_classes(path, text, name)
    return found


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into a new folder.

    Raises:
        NewPluginError: the folder exists, or cannot be written.
    """
    try:
        folder.mkdir(parents=True)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise NewPluginError(f"{folder} exists; name another folder with --output DIR") from None
    except OSError as error:
        raise NewPluginError(f"{folder} cannot be written: {error}") from None


def built_in() -> PluginSet:
    """Return the built-in plugins."""
    return load_plugins(entry_points=False)


def _sections(template: str) -> dict[str, str]:
    """Return the files of a template by path, before substitution."""
    parts = FILE.split((TEMPLATES / f"{template}.txt").read_text(encoding="utf-8"))
    return dict(zip(parts[1::2], parts[2::2]))


def _check_classes(path: str, text: str, name: str) -> None:
    """Raise NewPluginError if a class of a module hides, or is hidden by, another one there."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.ClassDef):
            found.append(node.name)
    twice = sorted({one for one in found if found.count(one) > 1})
    if twice:
        raise NewPluginError(
            f"the name {name!r} gives {path} a class {twice[0]}, which it has already; "
            "choose another name"
        )
