"""A plan as a text table of decisions, with origin, reason and bytes. No torch."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from glowplug.core.plan.budget.units import human
from glowplug.core.plan.layout_table import layout_rows, total_rows
from glowplug.core.plan.plan import BudgetLine, EnginePlan

HEADER = ("what", "choice", "by", "why", "bytes")
MAX_CHOICE = 24  #: widest column of choices; longer ones wrap
MIN_WHY = 24  #: narrowest column of reasons
DETAILS = ("brief", "full", "none")  #: levels of detail in which commands show a plan


def render(plan: EnginePlan, width: int | None = None, brief: bool = False) -> str:
    """Return the plan as a text table.

    Args:
        width: width in characters; None for the terminal's. Long reasons wrap.
        brief: show only given values, notable decisions and memory. A last line states how to
            show the rest.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    whole = rows(plan)
    kept = rows(plan, brief=True) if brief else whole
    rest = (
        f"{len(whole) - len(kept)} more lines have default values: "
        "--plan full, or glowplug check, shows all of them"
    )
    lines = [*textwrap.wrap(_head(plan), width), *table([HEADER, *kept], width)]
    return "\n".join([*lines, *textwrap.wrap(rest, width)] if brief else lines)


def _head(plan: EnginePlan) -> str:
    """Return the line above the table: model, ranks, machine and fingerprint."""
    model = plan.facts.model
    kind = f"{model.architecture}, {model.num_layers} layers"
    if model.n_routed_experts:
        kind += f", {model.n_routed_experts} experts"
    ranks = f"{plan.ranks} rank" + ("s" if plan.ranks > 1 else "")
    if plan.hosts > 1:
        ranks += f" over {plan.hosts} hosts"
    where = f"{ranks} on {plan.facts.hardware.name} ({plan.device})"
    return f"{plan.model}: {kind}; {where}; fingerprint {plan.fingerprint}"


def rows(plan: EnginePlan, brief: bool = False) -> list[tuple[str, str, str, str, str]]:
    """Return the table's rows: decisions, the layout of several ranks, and budget lines.

    Args:
        brief: keep only decisions of the operator, notable decisions, and budget lines. The model
            is left out too, because the line above the table names it.
    """
    kept = [
        decision
        for decision in plan.decisions
        if not brief
        or (decision.notable or decision.by == "operator")
        and decision.field != "model"
    ]
    found = [
        (decision.field, shown(decision.value), decision.by.rpartition(".")[2], decision.why, "")
        for decision in kept
    ]
    found += [] if brief else layout_rows(plan)
    found += [
        (f"memory: {line.name}", line.place, "size", line.how + _spread(line), human(line.bytes))
        for line in plan.budget
    ]
    return [
        *found,
        *((name, "", "size", why, human(total)) for name, why, total in total_rows(plan)),
    ]


def _spread(line: BudgetLine) -> str:
    """Return the smallest number of bytes of any rank as text; "" if all ranks have equal ones."""
    return f" ({human(min(line.ranks))} on the lightest)" if line.ranks else ""


def shown(value: Any) -> str:
    """Convert a decided value to text of at most 40 characters."""
    if isinstance(value, bool):
        return "on" if value else "off"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def table(lines: Sequence[Sequence[str]], width: int) -> Iterable[str]:
    """Yield the lines of a text table with aligned columns and a rule under its first line.

    Long text wraps in the second and the fourth column. The fourth column is as wide as the
    others leave room in ``width``.
    """
    sizes = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    sizes[1] = min(sizes[1], MAX_CHOICE)
    sizes[3] = max(MIN_WHY, min(sizes[3], width - sum(sizes[:3]) - sizes[4] - 8))
    for number, (what, choice, by, why, count) in enumerate(lines):
        columns = [
            [what],
            textwrap.wrap(choice, sizes[1]),
            [by],
            textwrap.wrap(why, sizes[3]),
            [count],
        ]
        for cells in itertools.zip_longest(*columns, fillvalue=""):
            yield _aligned(cells, sizes)
        if number == 0:
            yield "  ".join("-" * size for size in sizes)


def _aligned(cells: Sequence[str], sizes: Sequence[int]) -> str:
    """Return one line of text; the last cell, a number of bytes, is right-aligned."""
    *texts, count = cells
    columns = [text.ljust(size) for text, size in zip(texts, sizes)]
    return "  ".join([*columns, count.rjust(sizes[-1])]).rstrip()
