"""``glowplug tune fp8-moe``: tuned tables of routed experts in block FP8."""

from __future__ import annotations

import os

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols.tuning import LayerShapes, Log, TuneTable
from glowplug.kernels.moe.fp8 import tuning as moe_fp8_tuning
from glowplug.plugins.quantization.block_fp8.weights import whole_blocks
from glowplug.plugins.quantization.tuning.dense_experts import others_of, rows_in


class Fp8ExpertsTuner:
    """``TableTuner`` (``core/protocols/tuning.py``) of routed experts in block FP8."""

    def __init__(self, plan: EnginePlan) -> None:
        """Do nothing: the layer shapes suffice, and ``plan`` is not used."""

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        found = {}
        for shape in shapes.experts:
            if shape.prefix not in shapes.quantized:
                continue
            problem = moe_fp8_tuning.Fp8ExpertsProblem(
                shape.count + shape.fused_shared,
                shapes.topk + shape.fused_shared,
                shape.hidden,
                whole_blocks(shape.inter),
                shape.fused_shared,
                others_of(shape),
            )
            label = f"E={problem.experts},N={problem.inter},H={problem.hidden}"
            found[problem] = TuneTable(
                label, problem.path, rows or moe_fp8_tuning.TOKENS, rows_in(problem.path), problem
            )
        return list(found.values())

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        moe_fp8_tuning.tune_experts(
            table.problem,
            table.path,
            tokens=table.missing,
            seconds=seconds,
            workers=min(8, os.cpu_count() or 1),
            log=log,
        )
