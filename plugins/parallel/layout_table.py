"""Table of the speeds of tensor parallelism and of DP attention, by which "auto" chooses.

There is one file for each card, number of ranks, and model and layout (``conditions``). Its part
``SPEEDS`` maps numbers of concurrent requests to the output tokens per second of each number of
groups; 1 stands for tensor parallelism alone. ``glowplug tune parallel --save-table`` writes it.
Plan zone: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from glowplug.core.facts.layout_speed import (
    LayoutSpeeds,
    compared,
    fastest_size,
    sizes_beside,
    switch_points,
)
from glowplug.core.facts.model_facts import Facts, ModelFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.modes import DecidedSize
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.options import DEVICE_DEFAULTS
from glowplug.kernels.launch import measured_tables, tuned_tables
from glowplug.kernels.launch.measured_tables import MEASURED, Found
from glowplug.kernels.launch.tuned_tables import NoTable

VERSION = 1  #: version of the files; others are not read
SPEEDS = "output tokens/s"
PLAIN = "tensor parallelism"
#: entries of a record that are kept in the table
KEPT = ("command", "date", "glowplug", "commit", "packages", "input_len", "output_len", "failed")


def kv_elements(model: ModelFacts) -> int:
    """Return the elements that a token has in the KV cache of a layer without parallelism."""
    if model.kv_lora_rank:
        return model.kv_lora_rank + model.qk_rope_head_dim
    return 2 * model.num_kv_heads * model.head_dim


#: sizes of a model on which the speeds of layouts depend
SIZES: Mapping[str, Callable[[ModelFacts], int]] = {
    "hidden": lambda model: model.hidden_size,
    "layers": lambda model: model.num_layers,
    "heads": lambda model: model.num_heads,
    "kv_elements": kv_elements,
    "dense_width": lambda model: model.sizes.width,
    "experts": lambda model: model.n_routed_experts,
    "experts_per_token": lambda model: model.sizes.experts_per_token,
    "expert_width": lambda model: model.sizes.expert_width,
}


class LayoutTable(NamedTuple):
    """A table.

    Attributes:
        speeds: output tokens per second by requests and number of groups.
        requests: lengths of the measured requests, for the plan.
    """

    speeds: LayoutSpeeds
    requests: str


def conditions(
    facts: Facts, device: str, mesh: Mapping[str, int], hosts: int, **values: Any
) -> dict[str, Any]:
    """Return the conditions by which the table of a layout is found.

    The lengths of requests are not among them, because a plan does not know them, nor are most of
    the engine's options. The table states both (``KEPT``).

    Args:
        facts: facts of the model and the machine.
        device: device type.
        mesh: mesh axis -> size; groups are not among the conditions.
        hosts: number of hosts.
        values: "dtype", "kv_dtype", "quantization" (name of the scheme) and "row_tokens" (those of
            a row in a decode step).
    """
    devices = facts.hardware.devices if device == "cuda" else ()
    card = devices[0].name if devices else device
    sizes = {name: size(facts.model) for name, size in SIZES.items()}
    ranks = {"ranks": mesh.get("tp", 1), "hosts": hosts, "ep": mesh.get("ep", 1)}
    return {"card": card, **ranks, **sizes, **values}


def planned_conditions(context: CheckContext) -> dict[str, Any]:
    """Return the conditions of a plan in which the number of groups is not decided yet."""
    values = context.values
    schemes = [chosen.name for chosen in context.of(QuantizationOffers)]
    return conditions(
        context.facts,
        values.device,
        values.mesh,
        values.hosts,
        dtype=values.dtype,
        kv_dtype=values.kv_dtype,
        quantization=scheme(context.facts.model, *schemes),
        row_tokens=values.width,
    )


def measured_conditions(plan: EnginePlan) -> dict[str, Any]:
    """Return the conditions of the plan of a measured layout."""
    return conditions(
        plan.facts,
        plan.device,
        plan.mesh,
        plan.hosts,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        quantization=scheme(plan.facts.model, plan.choice("quantization").name),
        row_tokens=plan.sizes.width,
    )


def scheme(model: ModelFacts, chosen: str = "none") -> str:
    """Return the quantization of the weights: the checkpoint's, else the scheme ``chosen``.

    NOTE: a plan decides the number of groups before a scheme that is left to "auto", which then
    reads an unquantized checkpoint as it is.
    """
    return chosen if model.quant_method == "none" else model.quant_method


def file_name(wanted: Mapping[str, Any]) -> str:
    """Return the file name of the table with these conditions."""
    model = "x".join(str(wanted[name]) for name in SIZES)
    others = {name: value for name, value in wanted.items() if name not in SIZES}
    stated = (f",{name}={tuned_tables.spelt(str(value))}" for name, value in others.items())
    return f"layouts,model={model}{''.join(stated)}.json"


def find(wanted: Mapping[str, Any]) -> Found[LayoutTable]:
    """Return the table with these conditions."""
    hosts = f" on {wanted['hosts']} hosts" if wanted["hosts"] > 1 else ""
    about = f"{wanted['card']}, {wanted['ranks']} ranks{hosts}, {wanted['dtype']}"
    return measured_tables.first_fitting(file_name(wanted), about, partial(read, wanted=wanted))


def read(path: Path, wanted: Mapping[str, Any]) -> LayoutTable:
    """Return the table in the file ``path``.

    Raises:
        NoTable: the file is no such table, has another version or other conditions, or does not
            compare layouts.
    """
    found = tuned_tables.contents(path)
    measured_tables.check_conditions(path, found, {"version": VERSION, **wanted})
    speeds = _speeds(path, found)
    sizes = sizes_beside(speeds)
    uneven = [size for size in sizes if wanted["ranks"] % size]
    if uneven:
        raise NoTable(f"{path} has {uneven[0]} groups of {wanted['ranks']} ranks")
    if not any(compared(speeds, size) for size in sizes):
        raise NoTable(f"{path} does not compare layouts with groups and without")
    stated = found[MEASURED]
    return LayoutTable(speeds, f"{stated.get('input_len')} + {stated.get('output_len')} tokens")


def _speeds(path: Path, found: Mapping[str, Any]) -> LayoutSpeeds:
    """Return the speeds in a table.

    Raises:
        NoTable: a number of requests, a number of groups or a speed is no positive number.
    """
    speeds: dict[int, dict[int, float]] = {}
    for requests, row in measured_tables.rows(path, found, SPEEDS, "layouts").items():
        if not all(groups.isdecimal() and int(groups) for groups in row):
            raise NoTable(f"{path} is no table of layouts: {SPEEDS} of {requests}")
        speeds[requests] = {int(groups): speed for groups, speed in row.items()}
    return speeds


def decided_groups(context: CheckContext, name: str) -> DecidedSize:
    """Return the number of groups that was measured fastest for the plan's concurrent requests.

    These are ``scheduler.max_running_requests``, or the default of the device.

    Args:
        context: the context of the strategy.
        name: name of the strategy, for the reason.
    """
    found = find(planned_conditions(context))
    if found.table is None:
        return DecidedSize(1, f"{found.why}: {PLAIN}")
    given = context.config.scheduler.max_running_requests
    running = given or DEVICE_DEFAULTS[context.values.device].running
    size = fastest_size(found.table.speeds, running)
    why = f"{found.why}, requests of {found.table.requests}: "
    points = switch_points(found.table.speeds)
    if not points:
        most = max(found.table.speeds)
        return DecidedSize(1, f"{why}{name} is not faster with {most} requests: {PLAIN}")
    from_ = points[size] if size > 1 else min(points.values())
    why += f"{name} from {from_} requests, at most {running} run"
    return DecidedSize(size, why if size > 1 else f"{why}: {PLAIN}")


def save_table(plan: EnginePlan, record: Mapping[str, Any]) -> Path:
    """Write the table of a record, and return its file.

    Args:
        plan: the plan of one of the measured layouts.
        record: the record of ``glowplug tune parallel``; "speeds" are the ``LayoutSpeeds``.
    """
    wanted = measured_conditions(plan)
    path = tuned_tables.path_to_write(file_name(wanted))
    kept = {name: record[name] for name in KEPT if name in record}
    speeds = {
        requests: {str(size): speed for size, speed in sorted(row.items())}
        for requests, row in record["speeds"].items()
    }
    measured_tables.write(path, {"version": VERSION, **wanted, **kept}, {SPEEDS: speeds})
    return path
