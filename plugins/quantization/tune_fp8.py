"""``glowplug tune fp8-gemm``: for each product in block FP8 the best configuration of our kernel, and who is fastest."""
from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import torch

from glowplug.core.plan import EnginePlan
from glowplug.core.tuning import LayerShapes, Log, TuneTable
from glowplug.kernels.triton import fp8_tuning
from glowplug.kernels.triton.moe_tuning import microseconds
from glowplug.plugins.quantization.fp8_gemm import PROVIDERS, Gemm, TritonGemm, provider_path
from glowplug.plugins.quantization.tune_moe import rows_in

COMPILES_LONG = frozenset({"flashinfer"})  #: libraries that take a minute at the first use: not measured


class Fp8GemmTuner:
    """``core/tuning.py``'s ``TableTuner``."""

    def __init__(self, plan: EnginePlan) -> None:
        self._failed: set[str] | None = None
        self._libraries: list[Gemm] = [provider() for provider in PROVIDERS
                                       if provider is not TritonGemm and provider.name not in COMPILES_LONG]

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        found = {}
        for shape in shapes.linears:
            if shape.name not in shapes.quantized:
                continue
            columns, depth = sum(shape.outputs), shape.inputs
            path = fp8_tuning.table_path(columns, depth)
            both = set(rows_in(path)) & set(_providers_known(columns, depth))
            found[columns, depth] = TuneTable(f"N={columns},K={depth}", path, rows or fp8_tuning.ROWS,
                                              tuple(sorted(both)), (columns, depth))
        return list(found.values())

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        columns, depth = table.problem
        deadline = time.monotonic() + seconds
        configs = {rows: fp8_tuning.candidates(rows, columns, depth) for rows in table.missing}
        self._compile([(rows, config) for rows, each in configs.items() for config in each], log)
        for position, rows in enumerate(table.missing):
            left = deadline - time.monotonic()
            if left <= 0:
                log(f"out of time; not measured: {table.missing[position:]}")
                return
            bench = fp8_tuning.Bench.make(rows, columns, depth)
            usable = [config for config in configs[rows] if json.dumps(config, sort_keys=True) not in self._known]
            share = time.monotonic() + left / (len(table.missing) - position)
            spent, config = fp8_tuning.fastest(bench, usable or configs[rows][:1], share)
            fp8_tuning.write_row(table.path, rows, config)
            times = {TritonGemm.name: spent, **self._others(bench, rows, columns, depth)}
            winner = min(times, key=lambda name: times[name])
            _note_provider(provider_path(), f"N={columns},K={depth}", rows, winner)
            log(f"{rows} rows: {winner}; " + ", ".join(f"{name} {value:.1f} us" for name, value in times.items()))

    @property
    def _known(self) -> set[str]:
        """Configurations that do not compile."""
        return self._failed or set()

    def _compile(self, wanted: list[tuple[int, fp8_tuning.Config]], log: Log) -> None:
        if not wanted:
            return
        started = time.monotonic()
        failed = fp8_tuning.compile_ahead(wanted, min(8, os.cpu_count() or 1))
        self._failed = self._known | failed
        log(f"{len(wanted)} configurations compiled in {time.monotonic() - started:.0f} s, {len(failed)} cannot be")

    def _others(self, bench: fp8_tuning.Bench, rows: int, columns: int, depth: int) -> dict[str, float]:
        """Microseconds of every library that is here and takes the shape. One that fails is left out."""
        found = {}
        for library in self._libraries:
            if library.missing() or not library.fits(rows, columns, depth):
                continue
            weights = [weight if library.pads else weight[:columns] for weight in bench.padded]
            calls = [lambda w=weight, call=library: call(bench.x, bench.x_scales, w, bench.w_scales,  # type: ignore[misc]
                                                         torch.bfloat16)
                     for weight in (weights * 4)[: max(4, len(weights))]]
            try:
                found[library.name] = microseconds(calls)
            except RuntimeError:
                torch.cuda.synchronize()
        return found


def _providers_known(columns: int, depth: int) -> tuple[int, ...]:
    path = provider_path()
    found = json.loads(path.read_text()) if path.is_file() else {}
    return tuple(int(rows) for rows in found.get(f"N={columns},K={depth}", ()))


def _note_provider(path: Path, problem: str, rows: int, name: str) -> None:
    """Add one measurement to the card's table of providers, which several processes may write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        table = json.loads(text) if text.strip() else {}
        known = {int(key): value for key, value in table.get(problem, {}).items()} | {rows: name}
        table[problem] = {str(key): value for key, value in sorted(known.items())}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(table, indent=1) + "\n")
