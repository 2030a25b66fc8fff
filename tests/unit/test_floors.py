"""Floors within core, import cycles, and the modules of core that plugins may import."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.support.source_tree import ROOT, imported, name_of, sources, tree

#: floors of core, lowest first: a module imports from its own floor and from lower ones
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("facts",),
    ("plugin",),
    ("config",),
    ("plan",),
    ("step",),
    ("protocols", "text"),
    ("layers", "engine", "speculation"),
    ("startup",),
    ("testing",),
    ("api",),
)
#: (module, folder it imports from a higher floor) -> reason
UPWARD = {
    ("plugin/hookspecs.py", "plan"): "names the contract: the hooks' signatures",
    ("plugin/hookspecs.py", "protocols"): "names the contract: the hooks' signatures",
    ("plugin/hookspecs.py", "text"): "names the contract: the hooks' signatures",
    ("plugin/hookspecs.py", "engine"): "names the contract: the hooks' signatures",
    (
        "plan/inputs.py",
        "text",
    ): "the operator's chat template is compiled before anything is loaded",
}
#: folders and modules of core that plugins, models and third parties import from
PUBLIC = (
    "api",
    "plugin",
    "protocols",
    "step",
    "layers",
    "speculation",
    "facts",
    "plan.plan",
    "errors",
)
#: (folder, prefix of core) that one kind of plugin may import beyond PUBLIC -> reason
ALSO = {
    ("plugins/executors", "startup"): "executors start ranks",
    ("plugins/executors", "engine"): "executors run the loop of a rank",
    ("plugins/outputs", "text"): "the tokenizer is text",
    ("plugins/tokenizers", "text"): "the tokenizer is text",
    ("plugins/grammar", "text"): "the tokenizer is text",
}


@cache
def modules() -> dict[str, Path]:
    """Return every module of ours by dotted name; a package by the name of its folder."""
    found = {}
    for path in sources():
        if path.is_relative_to(ROOT / "src"):
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("glowplug", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def reached(module: str) -> str | None:
    """Return the module of ours that an import of ``module`` (or of a name in it) loads."""
    while module.startswith("glowplug."):
        if module in modules():
            return module
        module = module.rpartition(".")[0]
    return None


@cache
def edges() -> dict[str, set[str]]:
    """Return each module's imports of our modules, those inside functions and TYPE_CHECKING
    included.
    """
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        targets = {reached(module) for module, _ in imported(path)} - {None, name}
        packages = {
            target for target in targets if target and modules()[target].name == "__init__.py"
        }
        empty = {package for package in packages if not tree(modules()[package]).body}
        found[name] = {target for target in targets if target} - empty
    return found


def floor_of(module: str) -> int | None:
    parts = module.split(".")
    if parts[:2] != ["glowplug", "core"] or len(parts) < 3:
        return None
    return next(number for number, names in enumerate(FLOORS) if parts[2] in names)


def test_core_imports_from_its_own_floor_or_a_lower_one() -> None:
    upward, used = [], set()
    for module, targets in edges().items():
        floor = floor_of(module)
        for target in targets:
            above = floor_of(target)
            if floor is None or above is None or above <= floor:
                continue
            file = name_of(modules()[module]).removeprefix("core/")
            key = (file, target.split(".")[2])
            if key in UPWARD:
                used.add(key)
            else:
                upward.append(f"{file} imports {target}")
    assert sorted(upward) == []
    assert used == set(UPWARD), "an exception that is not needed"


def test_every_module_of_core_is_on_a_floor() -> None:
    named = {name for names in FLOORS for name in names}
    found = {module.split(".")[2] for module in modules() if module.startswith("glowplug.core.")}
    assert found - named == set()


def cycles() -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan, SIAM J. Comput.
    1972).
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(edges()[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(edges()):
        if module not in index:
            visit(module)
    return found


#: modules of the one cycle that is left, and why
KNOWN_CYCLE = "glowplug.core.plugin.hookspecs"


def test_no_import_cycles() -> None:
    assert [cycle for cycle in cycles() if KNOWN_CYCLE not in cycle] == []


def test_plugins_import_the_public_part_of_core() -> None:
    wrong = []
    for module, targets in edges().items():
        home = name_of(modules()[module])
        if not home.startswith(("plugins/", "models/")) or "training" in home:
            continue
        for target in targets:
            inside = target.removeprefix("glowplug.core.")
            if inside == target or _starts(inside, PUBLIC):
                continue
            if not any(
                home.startswith(folder) and _starts(inside, (prefix,)) for folder, prefix in ALSO
            ):
                wrong.append(f"{home} imports {target}")
    assert sorted(wrong) == []


def _starts(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)
