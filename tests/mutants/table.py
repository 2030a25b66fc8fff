"""The table of planted faults in docs/mutants.md: ``python -m tests.mutants.table`` writes it."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

from tests.mutants.framework import Mutant

MODULES = (
    "attending",
    "drafting",
    "layers",
    "loading",
    "ranks",
    "sampling",
    "scheduling",
    "schemes",
    "tiers",
    "whole_engines",
)
PAGE = Path(__file__).parents[2] / "docs/mutants.md"
HEAD = """<!-- Written by `python -m tests.mutants.table`; do not edit. -->

# Planted faults

Each conformance suite of `core/testing/suites` is proven with planted faults: a correct component
with one change (`tests/mutants`). A fault counts as caught if the named test of the suite fails
with it and passes without it; `make test` runs all of them.

"""


def mutants() -> list[Mutant]:
    """Return all mutants."""
    found: list[Mutant] = []
    for name in MODULES:
        found += importlib.import_module(f"tests.mutants.{name}").MUTANTS
    return found


def page() -> str:
    """Return the text of docs/mutants.md."""
    every = sorted(mutants(), key=lambda one: one.slot)
    counts = Counter(one.slot for one in every)
    total = ", ".join(f"{slot} {count}" for slot, count in counts.items())
    lines = [f"{len(every)} faults: {total}.", ""]
    lines += ["| slot | fault | caught by |", "|---|---|---|"]
    lines += [f"| {one.slot} | {one.fault} | `{one.by}` |" for one in every]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
