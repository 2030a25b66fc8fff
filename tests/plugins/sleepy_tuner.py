"""A tuner without a device: it "measures" by a table's shape, as slowly as configured, and writes
each number at once.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from glowplug.core.plugin.component import Tuner
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.protocols.tuning import LayerShapes, Log, TuneTable
from glowplug.kernels.launch import tuned_tables

SECONDS = 0.05  #: a measurement


@hookimpl
def tuners() -> list[Tuner]:
    return [Tuner("sleepy", "tests.plugins.sleepy_tuner:SleepyTuner", "sleeps")]


class SleepyTuner:
    def __init__(self, plan: Any) -> None:
        self.folder = Path(os.environ["SLEEPY_TABLES"])

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        found = []
        for shape in shapes.linears:
            label = f"N={sum(shape.outputs)},K={shape.inputs}"
            path = self.folder / f"{label}.json"
            done = tuple(map(int, json.loads(path.read_text()))) if path.is_file() else ()
            found.append(TuneTable(label, path, rows or (1, 8, 64), done, shape))
        return list({table.label: table for table in found}.values())

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        deadline = time.monotonic() + seconds
        for rows in table.missing:
            if time.monotonic() > deadline:
                log(f"out of time at {rows}")
                return
            time.sleep(SECONDS)
            known = json.loads(table.path.read_text()) if table.path.is_file() else {}
            by = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            tuned_tables.write(table.path, {**known, str(rows): {"by": by}})
            log(f"{rows} rows")
