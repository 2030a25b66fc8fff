"""Rows of measured kernel calls, and their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glowplug.entrypoints.bench.others import report

if TYPE_CHECKING:
    from glowplug.entrypoints.bench.kernel.calls import Call

SLOTS = ("attention", "ops", "linear", "experts", "sampling")  #: slots in the order of the tables
COLUMNS = (
    "slot",
    "kernel",
    "shapes",
    "layer",
    "provider",
    "us",
    "TB/s",
    "TFLOP/s",
    "of floor",
    "differs",
    "step us",
)


def call_row(
    call: Call, step: str, provider: str, spent: float, rates: tuple[float, float]
) -> dict[str, Any]:
    """Return the table row of one measured call.

    Args:
        call: the call.
        step: name of the step.
        provider: name of the provider.
        spent: seconds that the call took.
        rates: (bytes, operations) per second that the device reaches; 0: unknown.
    """
    bandwidth, matrix_rate = rates
    floor = max(
        call.moved / bandwidth if bandwidth else 0.0,
        call.flops / matrix_rate if matrix_rate else 0.0,
    )
    spent = max(spent, 1e-9)
    return {
        "step": step,
        "slot": call.slot,
        "kernel": call.name,
        "shapes": call.shape,
        "layer": call.layer,
        "key": call.key,
        "provider": provider,
        "us": spent * 1e6,
        "tb_s": call.moved / spent / 1e12,
        "tflop_s": call.flops / spent / 1e12,
        "moved_bytes": call.moved,
        "flops": call.flops,
        "share_of_floor": floor / spent if floor else None,
    }


def difference(out: Any, reference: Any) -> float | None:
    """Return the relative difference between a provider's result and that of the plan's choice.

    Returns:
        ``|out - reference| / |reference|``; None if a result is missing or the two shapes
            differ.
    """
    if out is None or reference is None or out.shape != reference.shape:
        return None
    reference = reference.float()
    scale = float(reference.norm())
    return float((out.float() - reference).norm()) / scale if scale else 0.0


def show(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text: a table for each step, in which a call's providers are adjacent.

    The heading of a table gives the total time of the providers that the plan chose.
    """
    parts = []
    for step in dict.fromkeys(row["step"] for row in rows):
        here = sorted((row for row in rows if row["step"] == step), key=_order)
        total = sum(row["step_us"] for row in here if row["provider"].endswith(" *"))
        table = report.table(COLUMNS, [_cells(row) for row in here])
        parts.append(
            f"{step}: the plan's choice (*) takes {total / 1e3:.3f} ms over all layers\n\n{table}"
        )
    return "\n\n".join(parts)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return a row's sort key: by slot, layer and kernel, then the fastest provider first."""
    layer = -1 if row["layer"] is None else row["layer"]
    return SLOTS.index(row["slot"]), layer, row["kernel"], row["shapes"], row["us"]


def _cells(row: dict[str, Any]) -> list[object]:
    """Return the cells of a row as the tables show them."""
    share = row["share_of_floor"]
    differs = row["differs"]
    return [
        row["slot"],
        row["kernel"],
        row["shapes"],
        "-" if row["layer"] is None else row["layer"],
        row["provider"],
        f"{row['us']:.1f}" + ("" if row["captured"] else " e"),
        f"{row['tb_s']:.2f}",
        f"{row['tflop_s']:.1f}",
        "-" if share is None else f"{share:.0%}",
        "-" if differs is None else f"{differs:.1e}",
        f"{row['step_us']:.0f}",
    ]
