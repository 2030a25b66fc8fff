"""Places where test sources compare a clock with a bound, found in their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from tests.support.source_tree import dotted

#: functions of the module ``time`` that return the time
CLOCKS = frozenset({"time", "monotonic", "perf_counter", "process_time", "thread_time"})
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
GROWING = frozenset(
    {"append", "add", "extend", "insert", "put"}
)  #: methods that put their arguments into an object
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
#: calls whose limit, in seconds, is their first argument or the one named ``timeout``
WAITS = frozenset(
    {
        "join",
        "communicate",
        "wait",
        "wait_procs",
        "create_connection",
        "result",
        "asyncio.timeout",
        "subprocess.run",
    }
)
SHORTEST_WAIT = 20.0  #: seconds; a shorter limit can also end a slow run on a busy machine

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Readings:
    """Names in one module that hold or return a clock's reading.

    Attributes:
        modules: Names of the module ``time``.
        clocks: Names of clocks themselves, as made by ``from time import monotonic``.
        returning: Functions of the module, and those it imports, that return a reading.
        methods: Methods of any class of the tests that return a reading.
    """

    modules: set[str] = field(default_factory=set)
    clocks: set[str] = field(default_factory=set)
    returning: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)

    def gives(self, name: str) -> bool:
        """Return whether a call of this dotted name gives a reading."""
        head, _, last = name.rpartition(".")
        if head:
            return (
                (head in self.modules and last in CLOCKS)
                or last in self.methods
                or name.endswith("loop.time")
            )
        return name in self.clocks or name in self.returning

    def holds(self, node: ast.AST, names: set[str]) -> bool:
        """Return whether the expression uses a reading, other than to make an object of a
        class.

        Args:
            names: Variables and attributes that hold a reading.
        """
        if isinstance(node, ast.Call):
            if self.gives(dotted(node.func)):
                return True
            if dotted(node.func).rpartition(".")[2][:1].isupper():  # one of its attributes, perhaps
                return False
        if isinstance(node, ast.Name | ast.Attribute) and dotted(node) in names:
            return True
        return any(self.holds(part, names) for part in ast.iter_child_nodes(node))


@cache
def imports_in(tree: ast.Module) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return all imports of a module, also those in functions."""
    found: list[ast.Import | ast.ImportFrom] = []
    blocks: list[ast.AST] = [tree]
    for block in blocks:  # of statements alone: no expression holds an import
        for node in ast.iter_child_nodes(block):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found.append(node)
            elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
                blocks.append(node)
    return tuple(found)


def readings(tree: ast.Module) -> Readings:
    """Return the names that a module's imports of the module ``time`` define."""
    found = Readings()
    for node in imports_in(tree):
        if isinstance(node, ast.Import):
            found.modules |= {
                alias.asname or alias.name for alias in node.names if alias.name == "time"
            }
        elif node.module == "time":
            found.clocks |= {
                alias.asname or alias.name for alias in node.names if alias.name in CLOCKS
            }
    return found


def functions(tree: ast.Module) -> Iterator[tuple[Function, bool]]:
    """Yield every function that is in no other one, and whether it is a method."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node, False
        elif isinstance(node, ast.ClassDef):
            yield from ((part, True) for part in node.body if isinstance(part, Function))


def names_of(target: ast.expr) -> set[str]:
    """Return the variables and attributes that an assignment sets."""
    if isinstance(target, ast.Tuple | ast.List):
        return {name for part in target.elts for name in names_of(part)}
    if isinstance(target, ast.Starred | ast.Subscript):
        return names_of(target.value)
    return {dotted(target)} - {""}


def assignments(function: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) of everything that names a value, including calls that put a value into
    an object.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if (
                    isinstance(target, ast.Tuple)
                    and isinstance(node.value, ast.Tuple)
                    and len(target.elts) == len(node.value.elts)
                ):
                    yield from zip(target.elts, node.value.elts, strict=True)
                else:
                    yield target, node.value
        elif (
            isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr)
            and node.value is not None
        ):
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield node.target, node.iter
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in GROWING
        ):
            yield from ((node.func.value, value) for value in node.args)


@cache
def calls_in(function: ast.AST) -> tuple[ast.Call, ...]:
    """Return all calls in a function."""
    return tuple(node for node in ast.walk(function) if isinstance(node, ast.Call))


@cache
def calls(function: ast.AST) -> frozenset[str]:
    """Return the dotted names that a function calls."""
    return frozenset(dotted(node.func) for node in calls_in(function))


def held(function: ast.AST, known: Readings) -> set[str]:
    """Return the variables and attributes of a function that hold a reading."""
    names: set[str] = set()
    pairs = list(assignments(function)) if any(map(known.gives, calls(function))) else []
    while True:
        more = {
            name
            for target, value in pairs
            if known.holds(value, names)
            for name in names_of(target)
        } - names
        if not more:
            return names
        names |= more


def returns(function: Function, known: Readings) -> bool:
    """Return whether the function returns a reading."""
    if not any(map(known.gives, calls(function))):
        return False
    names = held(function, known)
    return any(
        isinstance(node, ast.Return) and node.value is not None and known.holds(node.value, names)
        for node in ast.walk(function)
    )


def modules_of(trees: Mapping[str, ast.Module]) -> dict[str, Readings]:
    """Return the readings of each module, including functions of other modules that it imports.

    Args:
        trees: Syntax trees by dotted module.
    """
    found = {name: readings(tree) for name, tree in trees.items()}
    imports = {
        name: [
            (node.module or "", alias)
            for node in imports_in(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        for name, tree in trees.items()
    }
    size = -1
    while size != (size := sum(len(one.returning) + len(one.methods) for one in found.values())):
        for name, tree in trees.items():
            one = found[name]
            for module, alias in imports[name]:
                if module in found and alias.name in found[module].returning:
                    one.returning.add(alias.asname or alias.name)
            for function, method in functions(tree):
                if returns(function, one):
                    (one.methods if method else one.returning).add(function.name)
        methods = {name for one in found.values() for name in one.methods}
        for one in found.values():
            one.methods |= methods
    return found


def is_timing(node: ast.expr) -> bool:
    """Return whether the expression is or contains the mark ``timing``."""
    return any(
        isinstance(part, ast.Attribute) and dotted(part) == "pytest.mark.timing"
        for part in ast.walk(node)
    )


def marked(tree: ast.Module, function: Function) -> bool:
    """Return whether the function, or its whole module, has the mark ``timing``."""
    whole = any(
        isinstance(node, ast.Assign) and is_timing(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and "pytestmark" in names_of(node.targets[0])
    )
    return whole or any(map(is_timing, function.decorator_list))


def compared(tree: ast.Module, known: Readings) -> Iterator[int]:
    """Yield the lines outside the mark ``timing`` at which a reading is compared with something."""
    for function, _ in functions(tree):
        if marked(tree, function) or not any(map(known.gives, calls(function))):
            continue
        names = held(function, known)
        for node in ast.walk(function):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            near = any(
                dotted(part.func) == "pytest.approx"
                for side in sides
                for part in ast.walk(side)
                if isinstance(part, ast.Call)
            )
            if (near or any(isinstance(sign, ORDERS) for sign in node.ops)) and known.holds(
                node, names
            ):
                yield node.lineno


def short_waits(tree: ast.Module) -> Iterator[int]:
    """Yield the lines outside the mark ``timing`` with a wait that gives up early."""
    for function, _ in functions(tree):
        if marked(tree, function):
            continue
        for node in calls_in(function):
            name = dotted(node.func)
            if name not in WAITS and not (
                isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
            ):
                continue
            limits = [word.value for word in node.keywords if word.arg == "timeout"]
            limits += node.args if len(node.args) == 1 else []
            for limit in limits:
                if (
                    isinstance(limit, ast.Constant)
                    and isinstance(limit.value, int | float)
                    and 0 < limit.value < SHORTEST_WAIT
                ):
                    yield node.lineno
