"""``glowplug tune fp8-gemm``: block FP8 linear layers.

Measures our kernel's best configuration and the fastest provider for each GEMM shape.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols.tuning import LayerShapes, Log, TuneTable
from glowplug.kernels.formats import fp8_triton
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.gemm import fp8 as fp8_gemm, tuning_fp8
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.timing import microseconds
from glowplug.plugins.quantization.block_fp8.gemm_providers import (
    PROVIDERS,
    Gemm,
    TritonGemm,
    provider_path,
)
from glowplug.plugins.quantization.shared import provider_choice
from glowplug.plugins.quantization.shared.provider_tables import (
    note_provider,
    rows_done,
    versions_here,
)
from glowplug.plugins.quantization.tuning.dense_experts import rows_in

#: libraries that compile for a minute at their first use; they are not measured
COMPILES_LONG = frozenset({"flashinfer"})
COLD_WEIGHT_BYTES = 128 << 20  #: bytes of weight copies read in turn, more than the cache holds
OWN_TIME_SHARE = 0.8  #: share of the time spent on our own kernel's configurations


class Fp8GemmTuner:
    """``TableTuner`` (``core/protocols/tuning.py``) of linear layers in block FP8.

    There are two tables: our kernel's best configurations, and the fastest providers. A row count
    that both have need not be measured again.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self._versions = versions_here(provider_choice.FP8.packages)
        self._libraries: list[Gemm] = [
            provider()
            for provider in PROVIDERS
            if provider is not TritonGemm and provider.name not in COMPILES_LONG
        ]

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        found = {}
        for shape in shapes.linears:
            if shape.name not in shapes.quantized:
                continue
            columns = sum(shape.outputs)
            depth = shape.inputs
            problem = tuned_tables.problem(columns, depth)
            path = tuned_tables.path_to_write(
                tuned_tables.file_name(problem, tuned_tables.FP8, (FP8_BLOCK, FP8_BLOCK))
            )
            provided = rows_done(provider_path(), problem, self._versions)
            both = set(rows_in(path)) & set(provided)
            found[problem] = TuneTable(
                problem, path, rows or tuning_fp8.ROWS, tuple(sorted(both)), (columns, depth)
            )
        return list(found.values())

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        columns, depth = table.problem
        deadline = time.monotonic() + seconds
        ours = tuning_fp8.tune_gemm(
            columns,
            depth,
            table.path,
            rows=table.missing,
            seconds=seconds * OWN_TIME_SHARE,
            workers=min(8, os.cpu_count() or 1),
            log=log,
        )
        for rows in table.missing:
            if rows not in ours or time.monotonic() > deadline:
                log(f"out of time before measuring the libraries at {rows} rows")
                return
            times = self.provider_times(rows, columns, depth, ours[rows])
            winner = min(times, key=lambda name: times[name])
            note_provider(provider_path(), table.label, rows, winner, self._versions)
            log(
                f"{rows} rows: {winner}; "
                + ", ".join(f"{name} {spent:.1f} us" for name, spent in times.items())
            )

    def provider_times(
        self, rows: int, columns: int, depth: int, config: tuned_tables.Config
    ) -> dict[str, float]:
        """Measure the time of a GEMM by each available provider that supports its shape.

        Providers that fail are left out.

        Args:
            rows: number of rows of x.
            columns: number of rows of the weight.
            depth: number of columns of both.
            config: configuration of our own kernel.

        Returns:
            Provider -> microseconds.
        """
        operands = Operands(rows, columns, depth)
        found = {
            TritonGemm.name: microseconds(
                operands.calls(partial(fp8_gemm.gemm, config=config), pads=False)
            )
        }
        for library in self._libraries:
            if library.missing() or not library.fits(rows, columns, depth):
                continue
            try:
                found[library.name] = microseconds(operands.calls(library, library.pads))
            except RuntimeError:
                torch.cuda.synchronize()
        return found


class Operands:
    """Operands of one GEMM, with more copies of the padded weight than the GPU's cache holds."""

    def __init__(self, rows: int, columns: int, depth: int, device: str = "cuda") -> None:
        self.columns = columns
        padded = -(-columns // FP8_BLOCK) * FP8_BLOCK
        self.x, self.x_scales = fp8_triton.quantize(
            torch.randn(rows, depth, device=device).bfloat16()
        )
        self.weights = [
            torch.randn(padded, depth, device=device).to(torch.float8_e4m3fn)
            for _ in range(copies(padded * depth))
        ]
        self.w_scales = torch.full(
            (padded // FP8_BLOCK, -(-depth // FP8_BLOCK)), 0.01, device=device
        )

    def calls(self, gemm: Callable[..., Any], pads: bool) -> list[Callable[[], object]]:
        """Return a function for each copy of the weight that calls ``gemm`` with that copy.

        Args:
            gemm: the provider.
            pads: True to pass the weight padded to whole blocks of rows.
        """
        return [
            lambda w=weight if pads else weight[: self.columns]: gemm(  # type: ignore[misc]
                self.x, self.x_scales, w, self.w_scales, torch.bfloat16
            )
            for weight in self.weights
        ]


def copies(size: int) -> int:
    """Return how many copies of a weight, 2 to 16, are together larger than the GPU's cache.

    ``size``: bytes of the weight.
    """
    return min(16, max(2, COLD_WEIGHT_BYTES // size))
