"""Who multiplies in block FP8: libraries and our own kernel behind one small protocol, chosen by
measurement.

Operands are as in ``kernels/gemm/fp8.py``. A library is looked for when it is first asked, never on
import.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.byte_costs import ROUND_TOKENS
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.plugins.quantization.block_fp8.plugin import HALVES
from glowplug.plugins.quantization.shared import provider_choice as gemm_order
from glowplug.plugins.quantization.shared.libraries import library

BLOCK = 128


class Gemm(Protocol):
    """One provider.

    Attributes:
        name: as in options and tables.
        pads: it wants the weight's rows filled up to whole blocks, and its result has as many
            columns.
    """

    name: str
    pads: bool

    def missing(self) -> str:
        """Why it cannot be used here; "": it can."""
        ...

    def fits(self, rows: int, columns: int, depth: int) -> bool: ...

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """x E4M3 [M, K], weight E4M3 [N, K] -> [M, N] in ``dtype``."""
        ...


class _Library:
    """What providers from a library share: import once, remember why it failed."""

    name = ""
    module = ""
    function = ""
    pads = False
    own = False  #: it runs on every card that this project's kernels do

    def __init__(self) -> None:
        self._call: Any = None
        self._missing: str | None = None

    def missing(self) -> str:
        if self._missing is None:
            self._missing = self._find()
        return self._missing

    def _find(self) -> str:
        try:
            self._call = library("gemm", self.name, self.module, (self.function,), self.own)
        except GlowplugError as error:
            return str(error)
        return ""


class TritonGemm(_Library):
    """Our own kernel: every shape, and scales of single rows."""

    name = "triton"
    module = "glowplug.kernels.gemm.fp8"
    function = "gemm"
    own = True

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return True

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out: Tensor = self._call(x, x_scales, weight, w_scales, dtype)
        return out


class DeepGemm(_Library):
    """DeepGEMM (DeepSeek-AI, 2025).

    NOTE: it compiles for seconds whenever its own rule picks tiles it has not used yet, and that
    depends on the rows. So it only takes numbers that come back and are tried before any request:
    few rows, and multiples of ROUND_TOKENS.
    """

    name = "deep_gemm"
    module = "deep_gemm"
    function = "fp8_gemm_nt"

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return (
            depth % BLOCK == 0 and columns % 16 == 0 and (rows <= 128 or rows % ROUND_TOKENS == 0)
        )

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        self._call((x, x_scales), (weight, w_scales), out)
        return out.to(dtype)


def whole_fours(
    x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor
) -> tuple[Tensor, ...]:
    """(x, weight^T, scales, scales^T), with rows of x up to a multiple of four, whose scales TMA
    can load.

    The rows behind x lie where ``fp8_quant.empty_quantized`` put x, and hold anything.
    """
    rows = -(-x.shape[0] // 4) * 4
    if rows != x.shape[0]:
        if (
            x.untyped_storage().nbytes()
            < (x.storage_offset() + rows * x.stride(0)) * x.element_size()
        ):
            x = torch.cat([x, x.new_empty(rows - x.shape[0], x.shape[1])])
        x = x.as_strided((rows, x.shape[1]), x.stride())
        x_scales = x_scales.as_strided((rows, x_scales.shape[1]), x_scales.stride())
    return x, weight.t(), x_scales, w_scales.t()


def side_by_side(scales: Tensor) -> Tensor:
    """float32 [M, G] -> [G, ceil4(M)], contiguous, whose last columns hold anything; as
    ``fp8_quant.empty_quantized`` made them they are there already."""
    rows, groups = scales.shape
    held = -(-rows // 4) * 4
    if scales.stride() != (1, held):
        return torch.nn.functional.pad(scales.t(), (0, held - rows)).contiguous()
    return scales.as_strided((groups, held), (held, 1))


class Cutlass(_Library):
    """CUTLASS as sgl_kernel builds it."""

    name = "cutlass"
    module = "sgl_kernel"
    function = "fp8_blockwise_scaled_mm"
    pads = True

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return depth % BLOCK == 0

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out: Tensor = self._call(*whole_fours(x, x_scales, weight, w_scales), dtype)
        return out[: x.shape[0]]


class Cublas(_Library):
    """cuBLASLt's block scaling through torch."""

    name = "cublas"
    module = "torch"
    function = "_scaled_mm"
    pads = True

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return depth % (4 * BLOCK) == 0

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out: Tensor = self._call(*whole_fours(x, x_scales, weight, w_scales), out_dtype=dtype)
        return out[: x.shape[0]]


class Flashinfer(_Library):
    """flashinfer's kernels for SM90: compiled for a minute at the first use.

    NOTE: 0.6.11 says that scales of x are [M, K / 128] and asks for no shape; its kernel reads [K /
    128, ceil4(M)].
    """

    name = "flashinfer"
    module = "flashinfer.gemm"
    function = "fp8_blockscale_gemm_sm90"

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return depth % BLOCK == 0 and columns % 64 == 0

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        self._call(x, weight, side_by_side(x_scales), w_scales, out=out)
        return out.to(dtype)


PROVIDERS: tuple[
    type[TritonGemm] | type[DeepGemm] | type[Cutlass] | type[Cublas] | type[Flashinfer], ...
] = (TritonGemm, DeepGemm, Cutlass, Cublas, Flashinfer)


class Providers:
    """Picks who multiplies a shape with results in ``dtype``: ``wanted`` by name, or "auto": by the
    card's table of measurements."""

    def __init__(
        self,
        wanted: str = "auto",
        table: gemm_order.Table | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._all: dict[str, Gemm] = {provider.name: provider() for provider in PROVIDERS}
        self._whole = dtype.itemsize > 2
        self._wanted = wanted
        self._measured = gemm_order.by_shape(measured_table() if table is None else table)
        self._picked: dict[tuple[int, int, int], Gemm] = {}
        if wanted != "auto" and self._all[wanted].missing():
            raise GlowplugError(self._all[wanted].missing())

    def pick(self, rows: int, columns: int, depth: int) -> Gemm:
        """For a product [rows, depth] x [columns, depth]^T whose scales are those of whole blocks."""
        shape = (rows, columns, depth)
        if shape not in self._picked:
            self._picked[shape] = next(
                found
                for name in self._order(*shape)
                if (found := self._all[name])
                and not (self._whole and name in HALVES)
                and not found.missing()
                and found.fits(*shape)
            )
        return self._picked[shape]

    def any_shape(self) -> Gemm:
        """Our own, which also takes scales of single rows."""
        return self._all[TritonGemm.name]

    def _order(self, rows: int, columns: int, depth: int) -> Iterator[str]:
        if self._wanted != "auto":
            yield from (self._wanted, TritonGemm.name)
            return
        measured = self._measured.get((columns, depth))
        if measured:
            yield tuned.nearest(measured, rows)
        yield from (gemm_order.UNMEASURED_FEW if rows <= gemm_order.FEW else gemm_order.UNMEASURED)


def measured_table() -> gemm_order.Table:
    """Of the current card; empty where nobody has measured."""
    return gemm_order.measured(gemm_order.FP8.kind, tuned.device_name())


def provider_path() -> Path:
    """Where ``measured_table`` looks."""
    return gemm_order.table_path(gemm_order.FP8.kind, tuned.device_name())
