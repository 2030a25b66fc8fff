"""Tables of decode attention that ``glowplug tune attention`` has measured. No torch.

A table is measured for one problem (heads, sizes and dtypes of a rank), row length, card and Triton
version. It maps a number of rows to ``{"us": {backend: microseconds}, "tiling": {..}, "versions":
{package: version}}``; ``tiling`` is the launch configuration of our own kernel. A backend reads the
table of the row length nearest to its longest row, by ratio, and there the nearest number of rows.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from glowplug.core.facts.kv_layout import local_heads
from glowplug.core.facts.mesh import axis_size, divides
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.component import CheckContext
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.tuned_tables import Config

PREFIX = "attention="  #: beginning of the file names
Tiling = TypeVar("Tiling")
Machine = tuple[str, str]  #: name of a card, version of Triton


@dataclass(frozen=True)
class AttentionProblem:
    """The decode attention of one rank.

    Attributes:
        kind: "mla" or "mha".
        heads: query heads.
        kv_heads: key heads; 1 for "mla".
        dim: numbers of a key head; for "mla" those of a cache entry.
        width: query tokens of a row.
        dtype: compute dtype.
        kv_dtype: dtype of the cache.
    """

    kind: str
    heads: int
    kv_heads: int
    dim: int
    width: int
    dtype: str
    kv_dtype: str

    def label(self, context: int) -> str:
        """Return the name of the table of rows of ``context`` keys."""
        return (
            f"{PREFIX}{self.kind},H={self.heads},K={self.kv_heads},D={self.dim},W={self.width},"
            f"context={context}"
        )

    def table_name(self, context: int, machine: Machine | None = None) -> str:
        """Return the file name of a table; ``machine``: None for this machine."""
        dtype = f"{self.dtype},kv={self.kv_dtype}"
        return tuned_tables.file_name(self.label(context), dtype, machine=machine)


def problem_of(
    model: ModelFacts, mesh: Mapping[str, int], dtype: str, kv_dtype: str, width: int
) -> AttentionProblem:
    """Return the decode attention of a rank of a layout. ``mesh``: mesh axis -> size."""
    ranks = axis_size("attn_tp", mesh)
    is_latent = model.kind == "mla"
    return AttentionProblem(
        model.kind,
        -(-model.num_heads // ranks),
        1 if is_latent else local_heads(model.num_kv_heads, ranks),
        model.kv_lora_rank + model.qk_rope_head_dim if is_latent else model.head_dim,
        width,
        dtype,
        kv_dtype,
    )


@cache
def tables(
    problem: AttentionProblem, machine: Machine | None = None
) -> dict[int, dict[int, Config]]:
    """Return the tables of a problem: keys of a row -> rows of a step -> measurements."""
    pattern = re.escape(problem.table_name(0, machine)).replace("context=0", r"context=(\d+)")
    found = {}
    for name in tuned_tables.names():
        match = re.fullmatch(pattern, name)
        table = tuned_tables.table(name) if match else None
        if match and table:
            found[int(match[1])] = table
    return found


@cache
def measured(
    problem: AttentionProblem, rows: int, longest: int, machine: Machine | None = None
) -> Config | None:
    """Return the measurements for a step of ``rows`` rows of at most ``longest`` keys.

    Returns:
        The measurements; None if there is no table, or if its largest number of rows is less than
        half of ``rows``.
    """
    return tuned_tables.near(_nearest_table(problem, longest, machine), rows)


def _nearest_table(
    problem: AttentionProblem, longest: int, machine: Machine | None
) -> dict[int, Config]:
    """Return the table of the row length nearest to ``longest`` by ratio; {} if there is none."""
    found = tables(problem, machine)
    if not found:
        return {}
    return found[min(found, key=lambda keys: (abs(math.log(keys / max(1, longest))), -keys))]


def fastest_of(found: Config | None, names: tuple[str, ...]) -> str | None:
    """Return the fastest of the backends ``names`` in the measurements ``found``.

    The result is None unless all of them were measured.
    """
    times = found.get("us", {}) if found else {}
    if not names or any(name not in times for name in names):
        return None
    return min(names, key=lambda name: float(times[name]))


class StepTables:
    """The measurements of decode steps that apply to a rank of a plan on this machine."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        self._found: dict[tuple[int, int, int], Config | None] = {}

    def find(self, rows: int, width: int, longest: int) -> Config | None:
        """Return the measurements for a step; None without a table that applies.

        Args:
            rows: number of rows.
            width: query tokens of a row.
            longest: number of keys of the longest row that can occur.
        """
        step = (rows, width, longest)
        if step not in self._found:
            plan = self._plan
            problem = problem_of(plan.facts.model, plan.mesh, plan.dtype, plan.kv_dtype, width)
            self._found[step] = measured(problem, rows, longest)
        return self._found[step]

    def fastest(self, names: tuple[str, ...], rows: int, width: int, longest: int) -> str | None:
        """Return the fastest of the backends ``names``; None unless all were measured.

        Further arguments as in :meth:`find`.
        """
        return fastest_of(self.find(rows, width, longest), names)


def tiling_of(found: Config | None, made: Callable[..., Tiling]) -> Tiling | None:
    """Return the tiling in the measurements ``found``; None without one, or if it is malformed.

    ``made``: class of the tiling.
    """
    stated = found.get("tiling") if found else None
    if not isinstance(stated, Mapping):
        return None
    try:
        return made(**stated)
    except TypeError as error:
        logging.getLogger("glowplug").warning("a tuned tiling is ignored: %s", error)
        return None


def release(version: str) -> str:
    """Return ``version`` without its local part."""
    return version.partition("+")[0]


def plan_table(context: CheckContext, width: int = 1) -> dict[int, Config]:
    """Return the table that applies to the steps of a plan that is being made; {} without one.

    ``width``: query tokens of a row.
    """
    values = context.values
    devices = context.facts.hardware.devices
    triton = context.facts.software.packages.get("triton", "")
    if values.device != "cuda" or not devices or not triton or not divides(values.mesh):
        return {}
    model = context.facts.model
    longest = context.config.context_length or model.max_positions
    problem = problem_of(model, values.mesh, values.dtype, values.kv_dtype, width)
    return _nearest_table(problem, longest, (devices[0].name, triton))


@dataclass(frozen=True)
class MeasuredTime:
    """The time of a backend's decode attention on a plan's GPU, for ``attention.use = "auto"``.

    Attributes:
        names: the backend itself; or those among whose kernels its decode steps choose.
    """

    names: tuple[str, ...]

    def __call__(self, context: CheckContext) -> float | None:
        """Return the geometric mean over the measured row counts, in microseconds.

        Of several backends the fastest counts at each row count. The result is None unless the
        plan's GPU has a table with all of them.
        """
        table = plan_table(context)
        best = [fastest_of(found, self.names) for found in table.values()]
        if not table or None in best:
            return None
        times = [float(found["us"][name]) for found, name in zip(table.values(), best)]
        return math.exp(sum(math.log(one) for one in times) / len(times))


def measured_time(*names: str) -> MeasuredTime:
    return MeasuredTime(names)


def chooses_among_others(offers: Any) -> bool:
    """Return whether a backend's decode steps choose among other backends' kernels.

    ``offers``: the backend's ``AttentionOffers``.
    """
    return isinstance(offers.measured, MeasuredTime) and len(offers.measured.names) > 1
