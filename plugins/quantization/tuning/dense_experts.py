"""``glowplug tune moe``: tuned tables of ``kernels/moe/tiles`` for a model's experts."""

from __future__ import annotations

import os
from pathlib import Path

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import ExpertsShape
from glowplug.core.protocols.tuning import LayerShapes, Log, TuneTable
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.moe import tuning as moe_tuning
from glowplug.kernels.moe.tiles import ExpertsProblem


class MoeTuner:
    """``TableTuner`` (``core/protocols/tuning.py``) of routed experts with dense weights."""

    def __init__(self, plan: EnginePlan) -> None:
        self._dtype = plan.dtype

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        found = []
        for shape in shapes.experts:
            if shape.prefix in shapes.quantized:
                continue
            problem = ExpertsProblem(
                shape.count + shape.fused_shared,
                shapes.topk + shape.fused_shared,
                shape.hidden,
                shape.inter,
                self._dtype,
                others_of(shape),
            )
            path = tuned_tables.path_to_write(problem.table_name)
            label = f"E={problem.experts},N={problem.inter},H={problem.hidden}"
            found.append(
                TuneTable(
                    label,
                    path,
                    rows or moe_tuning.TOKENS,
                    rows_in(path),
                    (problem, shape.fused_shared),
                )
            )
        return found

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        problem, shared = table.problem
        table.path.parent.mkdir(parents=True, exist_ok=True)
        moe_tuning.tune_experts(
            problem,
            shared,
            table.path,
            tokens=table.missing,
            seconds=seconds,
            workers=min(8, os.cpu_count() or 1),
            log=log,
        )


def others_of(shape: ExpertsShape) -> int:
    """Return the number of the layer's routed experts that other ranks hold."""
    return max(0, shape.total - shape.count)


def rows_in(path: Path) -> tuple[int, ...]:
    """Return the row counts that a tuner that writes to ``path`` has measurements for, ascending.

    Raises:
        ValueError: the file cannot be read as a table.
    """
    try:
        return tuple(tuned_tables.begun(path))
    except tuned_tables.NoTable as error:
        raise ValueError(f"{error}: move it away") from None
