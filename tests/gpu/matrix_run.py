"""The run of a matrix of combinations: which cells are admitted, their order, and a record that is
written as results come, so that a run that is cut short can be continued.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plugin.registry import PluginSet, load_plugins
from tests.gpu.cells import Cell, admitted, pairwise, write_models
from tests.gpu.record import left_by

PART = 300  #: cells that a process plans at a time


@dataclass(frozen=True)
class Outcome:
    """The result of one cell.

    Attributes:
        same: Share of tokens that are the reference's very best.
        regret: See Bound.
        shift: See Bound.
        accepted: Tokens that a verified row yields.
    """

    same: float
    regret: float
    shift: float
    accepted: float


Done = tuple[Cell, Outcome | None, str]  #: a cell, its result, or the reason why there is none


@dataclass(frozen=True)
class Matrix:
    """A matrix of combinations, and how each is run.

    Attributes:
        module: the module whose command runs the matrix.
        plugins: modules of further plugins.
        cells: function that returns the whole matrix for a device, admitted or not.
        prepare: function that prepares a process for cells on a device.
        attempt: function that runs a cell in a prepared process.
        axes: attributes of cells by which results are summed up.
        models: function that writes the models into a folder, small ones for a CPU.
        pairs_first: True: the first cells cover every pair of values.
    """

    module: str
    plugins: tuple[str, ...]
    cells: Callable[[PluginSet, str], Sequence[Cell]]
    prepare: Callable[[str], None]
    attempt: Callable[[Any], Done]
    axes: tuple[str, ...]
    models: Callable[[Path, bool], Path] = write_models
    pairs_first: bool = False

    def order(self, cells: Sequence[Cell], seed: int = 1) -> list[Cell]:
        """Return the cells in the order in which they are run."""
        drawn = random.Random(seed).sample(cells, len(cells))
        first = pairwise(cells, seed) if self.pairs_first else []
        return [*first, *(cell for cell in drawn if cell not in set(first))]


def whole(
    matrix: Matrix, cells: Sequence[Cell], device: str, jobs: int, seconds: float
) -> Iterator[Done]:
    """Yield results as they are ready, until ``seconds`` are over."""
    deadline = time.monotonic() + seconds
    if jobs == 1:
        matrix.prepare(device)
        for cell in cells:
            if time.monotonic() > deadline:
                return
            yield matrix.attempt(cell)
        return
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), matrix.prepare, (device,)
    ) as pool:
        waiting = [pool.submit(matrix.attempt, cell) for cell in cells]
        for done in as_completed(waiting):
            if not done.cancelled():
                yield done.result()
            if time.monotonic() > deadline:
                pool.shutdown(wait=False, cancel_futures=True)
                return


def summary(done: Sequence[Done], by: str) -> dict[str, dict[str, float]]:
    """Return by one axis the runs, the failures, and the worst values of the bounded figures."""
    found: dict[str, dict[str, float]] = {}
    for cell, outcome, _ in done:
        entry = found.setdefault(
            str(getattr(cell, by)),
            {"run": 0, "failed": 0, "worst_regret": 0, "worst_shift": 0, "least_same": 1},
        )
        entry["run"] += 1
        entry["failed"] += outcome is None
        if outcome is not None:
            entry |= {
                "worst_regret": max(entry["worst_regret"], round(outcome.regret, 4)),
                "worst_shift": max(entry["worst_shift"], round(outcome.shift, 4)),
                "least_same": min(entry["least_same"], round(outcome.same, 3)),
            }
    return found


def record(
    matrix: Matrix, done: Sequence[Done], chosen: Sequence[Cell], started: float
) -> dict[str, Any]:
    """Return the record of the cells run so far; ``complete`` once all ``chosen`` ones were run,
    which are otherwise named in ``not_run``.
    """
    failures = {cell.name: why for cell, _, why in done if why}
    run = {cell for cell, _, _ in done}
    return {
        "complete": len(done) == len(chosen),
        "run": len(done),
        "failed": len(failures),
        "failures": failures,
        "not_run": [cell.name for cell in chosen if cell not in run],
        "seconds": round(time.time() - started),
        "by": {axis: summary(done, axis) for axis in matrix.axes},
    }


def planned(
    matrix: Matrix, cells: Sequence[Cell], device: str, facts: str | None = None
) -> tuple[list[Cell], dict[str, int]]:
    """Return the admitted cells, and the reasons of the others with their counts.

    A plan takes about 20 ms, so large matrices are planned by all cores.

    Args:
        matrix: the matrix.
        cells: the cells.
        device: "cpu" or "cuda".
        facts: name of a fact sheet; None: this machine.
    """
    parts = [cells[start : start + PART] for start in range(0, len(cells), PART)]
    work = partial(_planned, matrix.plugins, matrix.models, device, facts)
    if len(parts) == 1:
        return work(cells)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(work, parts))
    reasons: Counter[str] = Counter()
    for _, counts in found:
        reasons.update(counts)
    return [cell for kept, _ in found for cell in kept], dict(reasons)


def _planned(
    modules: tuple[str, ...],
    models: Callable[[Path, bool], Path],
    device: str,
    facts: str | None,
    cells: Sequence[Cell],
) -> tuple[list[Cell], dict[str, int]]:
    """Return what ``planned`` returns. ``modules`` and ``models``: see ``Matrix``."""
    hardware = read_sheet(facts) if facts else None
    with tempfile.TemporaryDirectory() as folder:
        written = models(Path(folder), device == "cpu")
        return admitted(cells, load_plugins(modules), written, device, hardware)


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of a matrix's command; ``about``: its description."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--jobs", type=int, default=4, help="processes that share the GPUs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="cells whose names match this")
    parser.add_argument(
        "--pairs", action="store_true", help="a sample that covers every pair of values"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    parser.add_argument(
        "--left-by",
        type=Path,
        help="of a run's output: only cells that it did not reach, or saw fail",
    )
    parser.add_argument(
        "--facts", metavar="SHEET", help="run nothing: count the cells admitted on this machine"
    )
    return parser


def run_matrix(matrix: Matrix, options: argparse.Namespace) -> int:
    """Run the cells that the options choose, and write the record after each of them.

    Returns:
        Exit status 1 if a cell failed, else 0.
    """
    started = time.time()
    plugins = load_plugins(matrix.plugins)
    every = matrix.cells(plugins, options.device)
    cells = [cell for cell in every if re.search(options.only, cell.name)]
    fitting, reasons = planned(matrix, cells, options.device, options.facts)
    if options.facts:
        counted = {"cells": len(cells), "admitted": len(fitting), "refused": reasons}
        print(json.dumps(counted, indent=1))
        return 0
    chosen = pairwise(fitting, 1) if options.pairs else matrix.order(fitting)
    passed_before = 0
    if options.left_by:
        left = left_by(options.left_by)
        remaining = [cell for cell in chosen if cell.name in left]
        passed_before = len(chosen) - len(remaining)
        chosen = remaining
    print(f"{len(cells)} cells, {len(fitting)} admitted, {len(chosen)} to run", flush=True)
    from glowplug.entrypoints.bench.others.conditions import conditions, conditions_apart
    from glowplug.entrypoints.bench.others.report import write_json

    said = conditions(options.device) | {
        "card": conditions_apart()["card"],
        "command": f"python -m {matrix.module} " + " ".join(sys.argv[1:]),
        "cells": len(cells),
        "admitted": len(fitting),
        "refused": reasons,
        "passed_before": passed_before,
    }
    done: list[Done] = []
    found = said | record(matrix, done, chosen, started)
    for cell, outcome, why in whole(matrix, chosen, options.device, options.jobs, options.seconds):
        done.append((cell, outcome, why))
        if why:
            print("FAILED", cell.name, why, flush=True)
        found = said | record(matrix, done, chosen, started)
        if options.output:  # written as results come: a stopped run keeps them
            write_json(options.output, found)
    shown = ("cells", "admitted", "passed_before", "run", "failed", "complete", "seconds", "by")
    print(json.dumps({key: found[key] for key in shown}))
    return 1 if found["failed"] else 0
