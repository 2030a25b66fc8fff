"""``glowplug tune moe``: the tables that routed experts read, over dense weights and in block FP8."""
from __future__ import annotations

import json
import os
from pathlib import Path

from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import ExpertsShape
from glowplug.core.tuning import LayerShapes, Log, TuneTable
from glowplug.kernels.triton import fp8_tuning, moe_tuning, tuned
from glowplug.kernels.triton.moe_experts import Problem


class MoeTuner:
    """``core/tuning.py``'s ``TableTuner``."""

    def __init__(self, plan: EnginePlan) -> None:
        self._dtype = plan.dtype

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        return [self._table(shape, shapes.topk + shape.shared, shape.prefix in shapes.quantized, rows)
                for shape in shapes.experts]

    def _table(self, shape: ExpertsShape, topk: int, fp8: bool, rows: tuple[int, ...]) -> TuneTable:
        count = shape.count + shape.shared
        label = f"E={count},N={shape.inter},H={shape.hidden}"
        if fp8:
            whole = -(-shape.inter // fp8_tuning.BLOCK) * fp8_tuning.BLOCK
            kept = fp8_tuning.Problem(count, topk, shape.hidden, whole, shape.shared)
            path = tuned.FOLDER / kept.table_name
            return TuneTable(f"{label},fp8", path, rows or fp8_tuning.ROWS, rows_in(path), kept)
        problem = Problem(count, topk, shape.hidden, shape.inter, self._dtype)
        path = tuned.FOLDER / problem.table_name
        return TuneTable(label, path, rows or moe_tuning.TOKENS, rows_in(path), (problem, shape.shared))

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        table.path.parent.mkdir(parents=True, exist_ok=True)
        workers = min(8, os.cpu_count() or 1)
        if isinstance(table.problem, fp8_tuning.Problem):
            fp8_tuning.tune_experts(table.problem, table.path, tokens=table.missing, seconds=seconds, workers=workers,
                                    log=log)
            return
        problem, shared = table.problem
        moe_tuning.tune_experts(problem, shared, table.path, tokens=table.missing, seconds=seconds, workers=workers,
                                log=log)


def rows_in(path: Path) -> tuple[int, ...]:
    """Numbers of rows that a table holds; () when there is none. ValueError naming a file that cannot be read."""
    if not path.is_file():
        return ()
    try:
        return tuple(sorted(int(rows) for rows in json.loads(path.read_text())))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a table of measurements ({error}): move it away") from None
