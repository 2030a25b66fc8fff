"""GEMM providers for block FP8: our own kernel and libraries, chosen by measured tables.

Operands are laid out as in ``kernels/gemm/fp8.py``. A library is imported at its first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.byte_costs import ROUND_TOKENS
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.launch import tuned_tables
from glowplug.plugins.quantization.block_fp8.plugin import SIXTEEN_BIT_ONLY
from glowplug.plugins.quantization.shared import provider_choice, provider_tables
from glowplug.plugins.quantization.shared.libraries import library


class Gemm(Protocol):
    """One provider of block FP8 GEMMs.

    Attributes:
        name: name of the provider in options and tables.
        pads: the weight must be padded to whole blocks of rows; the result then has a column for
            each padding row.
    """

    name: str
    pads: bool

    def missing(self) -> str:
        """Return the reason why the provider cannot be used on this machine; "" if it can."""
        ...

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        """Return True if the provider supports the GEMM [rows, depth] x [columns, depth]^T."""
        ...

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return x [M, K] times weight [N, K] transposed.

        Args:
            x: E4M3 [M, K].
            x_scales: scales of ``x``.
            weight: E4M3 [N, K].
            w_scales: scales of ``weight``.
            dtype: of the result.

        Returns:
            [M, N] in ``dtype``.
        """
        ...


class _Library:
    """Base class of providers: imports the library once, and keeps the reason if that fails."""

    name = ""
    module = ""
    function = ""
    pads = False
    own = False  #: whether it runs on every GPU that this project's kernels support

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
    """Our own kernel, which supports every shape and also scales per row."""

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
    """GEMMs by DeepGEMM (DeepSeek-AI, 2025).

    NOTE: DeepGEMM compiles for seconds when its heuristic first picks a tile configuration, and the
    pick depends on the number of rows. It is therefore used only for row counts that are common and
    that warm-up runs before any request: few rows, and multiples of ``ROUND_TOKENS``.
    """

    name = "deep_gemm"
    module = "deep_gemm"
    function = "fp8_gemm_nt"

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return (
            depth % FP8_BLOCK == 0
            and columns % 16 == 0
            and (rows <= 128 or rows % ROUND_TOKENS == 0)
        )

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        self._call((x, x_scales), (weight, w_scales), out)
        return out.to(dtype)


def padded_to_four_rows(
    x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor
) -> tuple[Tensor, ...]:
    """Return a GEMM's operands with the rows of ``x`` padded to a multiple of four.

    TMA can load scales only if the number of rows is such a multiple. The padding rows are
    uninitialised. If ``fp8_triton.empty_quantized`` allocated ``x``, the memory after ``x`` has
    room for them; otherwise ``x`` is copied.

    Returns:
        (x, weight^T, scales of x, transposed scales of the weight).
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


def transposed_scales(scales: Tensor) -> Tensor:
    """Return ``scales`` float32 [M, G] transposed, contiguous and padded to [G, ceil4(M)].

    ceil4(M) is M rounded up to a multiple of four. The padding columns are uninitialised or zero.
    Scales from ``fp8_triton.empty_quantized`` have this layout already and are not copied.
    """
    rows, groups = scales.shape
    held = -(-rows // 4) * 4
    if scales.stride() != (1, held):
        return torch.nn.functional.pad(scales.t(), (0, held - rows)).contiguous()
    return scales.as_strided((groups, held), (held, 1))


class CutlassGemm(_Library):
    """GEMMs by CUTLASS, in sgl_kernel's build."""

    name = "cutlass"
    module = "sgl_kernel"
    function = "fp8_blockwise_scaled_mm"
    pads = True

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return depth % FP8_BLOCK == 0

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out: Tensor = self._call(*padded_to_four_rows(x, x_scales, weight, w_scales), dtype)
        return out[: x.shape[0]]


class Cublas(_Library):
    """GEMMs by cuBLASLt with block scales, through torch."""

    name = "cublas"
    module = "torch"
    function = "_scaled_mm"
    pads = True

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return depth % (4 * FP8_BLOCK) == 0

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out: Tensor = self._call(
            *padded_to_four_rows(x, x_scales, weight, w_scales), out_dtype=dtype
        )
        return out[: x.shape[0]]


class Flashinfer(_Library):
    """FlashInfer's kernels for SM90, which compile for a minute at the first use.

    NOTE: FlashInfer 0.6.11 documents the scales of x as [M, K / 128] and checks no shape; its
    kernel reads [K / 128, ceil4(M)].
    """

    name = "flashinfer"
    module = "flashinfer.gemm"
    function = "fp8_blockscale_gemm_sm90"

    def fits(self, rows: int, columns: int, depth: int) -> bool:
        return depth % FP8_BLOCK == 0 and columns % 64 == 0

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        self._call(x, weight, transposed_scales(x_scales), w_scales, out=out)
        return out.to(dtype)


PROVIDERS: tuple[
    type[TritonGemm] | type[DeepGemm] | type[CutlassGemm] | type[Cublas] | type[Flashinfer], ...
] = (TritonGemm, DeepGemm, CutlassGemm, Cublas, Flashinfer)


class Providers:
    """The choice of a provider for each GEMM shape.

    Args:
        wanted: name of a provider, or "auto" for the fastest by the GPU's measured table.
        table: measurements; None: those of the current GPU.
        dtype: of the results.

    Raises:
        GlowplugError: the named provider cannot be used.
    """

    def __init__(
        self,
        wanted: str = "auto",
        table: provider_tables.Table | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._all: dict[str, Gemm] = {provider.name: provider() for provider in PROVIDERS}
        self._float32_results = dtype.itemsize > 2
        self._wanted = wanted
        self._measured = provider_choice.by_shape(measured_table() if table is None else table)
        self._picked: dict[tuple[int, int, int], Gemm] = {}
        if wanted != "auto" and self._all[wanted].missing():
            raise GlowplugError(self._all[wanted].missing())

    def pick(self, rows: int, columns: int, depth: int) -> Gemm:
        """Return the provider for the GEMM [rows, depth] x [columns, depth]^T with block scales."""
        shape = (rows, columns, depth)
        if shape not in self._picked:
            self._picked[shape] = next(
                found
                for name in self._order(*shape)
                if (found := self._all[name])
                and not (self._float32_results and name in SIXTEEN_BIT_ONLY)
                and not found.missing()
                and found.fits(*shape)
            )
        return self._picked[shape]

    def any_shape(self) -> Gemm:
        """Return the provider for any shape: our own kernel; it also supports scales per row."""
        return self._all[TritonGemm.name]

    def _order(self, rows: int, columns: int, depth: int) -> Iterator[str]:
        """Yield the names of providers for a GEMM shape, the preferred one first."""
        if self._wanted != "auto":
            yield from (self._wanted, TritonGemm.name)
            return
        measured = tuned_tables.near(self._measured.get((columns, depth), {}), rows)
        if measured is not None:
            yield measured
        yield from (
            provider_choice.UNMEASURED_FEW_ROWS
            if rows <= provider_choice.FEW_ROWS_MAX
            else provider_choice.UNMEASURED_MANY_ROWS
        )


def measured_table() -> provider_tables.Table:
    """Return the table of the fastest block FP8 providers on the current GPU.

    The table is empty if there are no measurements.
    """
    return provider_choice.measured(provider_choice.FP8.kind, tuned_tables.device_name())


def provider_path() -> Path:
    """Return the path of the table of the fastest block FP8 providers on the current GPU."""
    return provider_choice.table_path(provider_choice.FP8.kind, tuned_tables.device_name())
