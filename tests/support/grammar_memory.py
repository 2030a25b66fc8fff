"""The memory of compiled grammars against the sizes that they state, in a process of its own.

``python -m tests.support.grammar_memory llguidance`` prints, for each kind of grammar, the bytes by
which the process grows with many different ones and the sum of their sizes.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable

import psutil

from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import Worker
from glowplug.core.startup.grammars import grammar_builder
from glowplug.core.step.structured import GrammarSpec
from tests.support.random_schemas import random_schema

FIRST = 20  #: grammars that are compiled before the memory is read


def _objects(number: int) -> str:
    """Return a union of objects, whose names depend on ``number``."""
    return json.dumps({"anyOf": [
        {"type": "object", "properties": {
            f"k{number}_{i}": {"type": "integer", "minimum": i, "maximum": 10 * number + i + 99},
            "b": {"type": "array", "items": {"type": "string"}},
        }} for i in range(60)
    ]})  # fmt: skip


def _formats(number: int) -> str:
    names = ("date-time", "date", "time", "email", "uri", "uuid", "ipv4", "ipv6", "hostname")
    properties = {f"{one}{number}": {"type": "string", "format": one} for one in names}
    return json.dumps({"type": "object", "properties": properties})


#: kind -> number of grammars, the kind of each, and its text by its number
GRAMMARS: dict[str, tuple[int, str, Callable[[int], str]]] = {
    "random": (300, "json_schema", lambda number: json.dumps(random_schema(number))),
    "objects": (40, "json_schema", _objects),
    "formats": (60, "json_schema", _formats),
    "classes": (60, "regex", lambda number: rf"\p{{L}}{{1,50}} {number} \w+"),
}


def main() -> None:
    plugins = load_plugins(entry_points=False)
    grammar = {"use": sys.argv[1], "cache_bytes": 1 << 40}
    plan = make_plan({"model": "embedded", "grammar": grammar}, plugins=plugins)
    builder = grammar_builder(plan, plugins, Worker())
    process = psutil.Process()
    found = {}
    for kind, (count, of, text) in GRAMMARS.items():
        for number in range(FIRST):
            builder.build(GrammarSpec(of, text(number)))
        gc.collect()
        stated, held = builder.cache.size, process.memory_info().rss
        for number in range(FIRST, FIRST + count):
            builder.build(GrammarSpec(of, text(number)))
        gc.collect()
        grown = process.memory_info().rss - held
        found[kind] = {"grown": grown, "stated": builder.cache.size - stated, "grammars": count}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
