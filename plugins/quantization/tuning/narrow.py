"""``glowplug tune int8-gemm`` and ``awq-gemm``: the fastest provider of int8 and int4 layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from glowplug.core.errors import GlowplugError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols.tuning import LayerShapes, Log, TuneTable
from glowplug.kernels.formats import awq as awq_format, int8_triton
from glowplug.kernels.gemm.tuning_fp8 import ROWS
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.timing import microseconds
from glowplug.plugins.quantization.awq import cuda as awq_cuda, plugin as awq_plugin
from glowplug.plugins.quantization.int8 import cuda as int8_cuda, plugin as int8_plugin
from glowplug.plugins.quantization.shared import provider_choice
from glowplug.plugins.quantization.shared.provider_tables import (
    note_provider,
    rows_done,
    versions_here,
)
from glowplug.plugins.quantization.tuning.fp8 import copies

#: provider -> one call for each copy of the weight
Calls = Mapping[str, Sequence[Callable[[], object]]]


class NarrowTuner:
    """``TableTuner`` (``core/protocols/tuning.py``) of linear layers in one quantization scheme.

    Only providers are measured; our own kernels choose their tiles by rules.

    Attributes:
        scheme: name of the quantization scheme.
        choice: its providers, and the prefix of the file names of its tables.
    """

    scheme = ""
    choice: provider_choice.GemmChoice

    def __init__(self, plan: EnginePlan, device: str = "cuda") -> None:
        self._plan = plan
        self._device = device
        self._dtype: torch.dtype = getattr(torch, plan.dtype)
        self._versions = versions_here(self.choice.packages)

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        if self._plan.choice("quantization").name != self.scheme:
            return []
        path = provider_choice.table_path(self.choice.kind, tuned_tables.device_name())
        sizes = dict.fromkeys(
            (sum(shape.outputs), shape.inputs)
            for shape in shapes.linears
            if shape.name in shapes.quantized
        )
        return [
            TuneTable(problem, path, rows or ROWS, rows_done(path, problem, self._versions), size)
            for size in sizes
            for problem in (tuned_tables.problem(*size),)
        ]

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        deadline = time.monotonic() + seconds
        for rows in table.missing:
            if time.monotonic() > deadline:
                log(f"out of time before measuring {rows} rows")
                return
            times = {
                name: microseconds(calls)
                for name, calls in self.calls(rows, *table.problem).items()
            }
            winner = min(times, key=lambda name: times[name])
            note_provider(table.path, table.label, rows, winner, self._versions)
            log(
                f"{rows} rows: {winner}; "
                + ", ".join(f"{name} {spent:.1f} us" for name, spent in times.items())
            )

    def calls(self, rows: int, columns: int, depth: int) -> Calls:
        """Return functions that compute a GEMM of this shape, by name of each available provider.

        A provider has one function for each copy of the weight [columns, depth]; x is
        [rows, depth].
        """
        raise NotImplementedError


class Int8GemmTuner(NarrowTuner):
    """Tuner of linear layers of the scheme ``w8a8_int8``."""

    scheme = int8_plugin.NAME
    choice = provider_choice.INT8

    def calls(self, rows: int, columns: int, depth: int) -> Calls:
        x = int8_triton.quantize(torch.randn(rows, depth, dtype=self._dtype, device=self._device))
        weights = [
            torch.randint(-127, 128, (columns, depth), dtype=torch.int8, device=self._device)
            for _ in range(copies(columns * depth))
        ]
        scales = torch.full((columns,), 0.01, device=self._device)
        providers = [int8_cuda.Int8Gemm("triton")]
        try:
            providers.append(int8_cuda.Int8Gemm("cutlass"))
        except GlowplugError:
            pass  # not installed
        return {
            provider.pick(rows, columns, depth, self._dtype): [
                partial(provider, *x, weight, scales, self._dtype, None) for weight in weights
            ]
            for provider in providers
        }


class AwqGemmTuner(NarrowTuner):
    """Tuner of linear layers of the scheme ``awq``, with the group size of the plan's model."""

    scheme = awq_plugin.NAME
    choice = provider_choice.AWQ

    def calls(self, rows: int, columns: int, depth: int) -> Calls:
        stated = awq_plugin.awq_group(self._plan.facts.model)
        group = depth if stated < 0 else stated
        x = torch.randn(rows, depth, dtype=self._dtype, device=self._device)
        packed = [
            torch.randint(
                -1 << 15,
                1 << 15,
                (-(-depth // awq_format.PACKED_INPUTS), columns, awq_format.PLANE),
                dtype=torch.int16,
                device=self._device,
            )
            for _ in range(copies(columns * depth // 2))
        ]
        scales = torch.full((depth // group, columns), 0.01, device=self._device)
        factors = awq_format.pack_factors(scales, torch.full_like(scales, 8.0), self._dtype)
        return {
            name: [
                partial(awq_cuda.AwqGemm(name), x, weight, factors, group, None)
                for weight in packed
            ]
            for name in provider_choice.AWQ.candidates
        }
