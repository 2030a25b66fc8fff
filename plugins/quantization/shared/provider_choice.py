"""Choice of the GEMM provider for quantized linear layers, and the plan's remark about it.

Providers are chosen from measured tables: one table per weight format and GPU, by shape and row
count. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glowplug.core.facts.machine import installed
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.options import QuantizationOptions
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.cards import LIBRARIES as LIBRARY_CARDS, TILES
from glowplug.plugins.quantization.awq.plugin import AwqOptions
from glowplug.plugins.quantization.block_fp8.plugin import LIBRARIES, BlockFp8Options
from glowplug.plugins.quantization.int8.plugin import LIBRARIES as INT8_LIBRARIES, W8A8Int8Options
from glowplug.plugins.quantization.shared.provider_tables import (
    TRITON,
    Table,
    file_name,
    provider_table,
)

FIELD = "quantization.gemm"
FEW_ROWS_MAX = 64  #: largest row count for which ``UNMEASURED_FEW_ROWS`` applies
#: providers in order of preference for block FP8 shapes without measurements, up to FEW_ROWS_MAX
#: rows; libraries that compile at first use come last
UNMEASURED_FEW_ROWS = ("triton",)
#: providers in order of preference above FEW_ROWS_MAX rows, likewise
UNMEASURED_MANY_ROWS = ("cublas", "cutlass", "triton")


@dataclass(frozen=True)
class RowRule:
    """The choice of a provider by row count, for GPUs without a table.

    The provider is ``small`` below ``threshold`` rows and ``large`` from there on.
    """

    small: str  #: provider below ``threshold`` rows
    large: str  #: provider from ``threshold`` rows on
    threshold: int

    def __str__(self) -> str:
        return f"{self.small} below {self.threshold} rows, {self.large} from {self.threshold} rows"


@dataclass(frozen=True)
class GemmChoice:
    """The providers of one weight format and the rules for choosing among them.

    Attributes:
        kind: prefix of the file names of the measured tables.
        candidates: provider -> packages, any one of which suffices; () if it needs none.
        unmeasured: rule where a GPU has no table.
        others: rule for shapes missing from a GPU's table, in words.
        on_every_gpu: True if all candidates run on every GPU; False if libraries are used only on
            GPUs where their 8-bit GEMMs were tried.
    """

    kind: str
    candidates: Mapping[str, tuple[str, ...]]
    unmeasured: str | RowRule
    others: str = "the provider of the nearest measured shape"
    on_every_gpu: bool = False

    @property
    def packages(self) -> list[str]:
        """Packages of all candidates."""
        return [name for packages in self.candidates.values() for name in packages]

    @property
    def tuner(self) -> str:
        """Name of the ``glowplug tune`` command that writes the tables."""
        return self.kind.replace("_", "-")


_FP8_RULE = (
    f"triton up to {FEW_ROWS_MAX} rows, then the first available of "
    f"{', '.join(UNMEASURED_MANY_ROWS)}"
)
FP8 = GemmChoice("fp8_gemm", {**LIBRARIES, "cublas": ()}, _FP8_RULE, _FP8_RULE)
INT8_ROWS = RowRule("triton", "cutlass", 64)
AWQ_ROWS = RowRule("triton", "cublas", 512)
INT8 = GemmChoice("int8_gemm", INT8_LIBRARIES, INT8_ROWS)
AWQ = GemmChoice("awq_gemm", {"triton": (), "cublas": ()}, AWQ_ROWS, on_every_gpu=True)
#: GEMM choice of each options class and its subclasses
CHOICES: Mapping[type[QuantizationOptions], GemmChoice] = {
    BlockFp8Options: FP8,
    W8A8Int8Options: INT8,
    AwqOptions: AWQ,
}


def narrow_options(context: CheckContext) -> QuantizationOptions | None:
    """Return the options of the chosen scheme if its weights stay quantised on CUDA devices.

    Returns:
        The options; None if the scheme dequantises its weights, or no scheme is chosen.
    """
    for scheme in context.chosen.get("quantization", ())[:1]:
        options = scheme.options
        offers = scheme.offers
        if isinstance(options, QuantizationOptions) and isinstance(offers, QuantizationOffers):
            return None if options.dequantizes("cuda", offers) else options
    return None


def remark(context: CheckContext) -> Decision | None:
    """Return a note for the plan's table on how ``quantization.gemm = "auto"`` is resolved.

    Returns:
        The note, which also names the installed candidates; None if there is nothing to choose:
        another option value, scheme or device.
    """
    options = narrow_options(context)
    cards = {card.compute for card in context.facts.hardware.devices}
    if (
        not isinstance(options, BlockFp8Options | W8A8Int8Options | AwqOptions)
        or options.gemm != "auto"
        or context.values.device != "cuda"
        or not cards <= TILES
    ):
        return None
    choice = next(choice for kind, choice in CHOICES.items() if isinstance(options, kind))
    if not choice.on_every_gpu and not cards <= LIBRARY_CARDS:
        return Decision(
            FIELD,
            "triton",
            "facts",
            "8-bit GEMMs of other libraries were not tried on this GPU",
            notable=True,
        )
    return _resolved(choice, context)


def _resolved(choice: GemmChoice, context: CheckContext) -> Decision:
    """Return a note on what chooses the providers on the GPUs: a measured table or a rule."""
    devices = context.facts.hardware.devices
    packages = context.facts.software.packages
    candidates = _candidates(choice, packages)
    triton = packages.get(TRITON, "")
    shapes = min((len(measured(choice.kind, card.name, triton)) for card in devices), default=0)
    card = devices[0].name
    again = f"run `glowplug tune {choice.tuner}` to measure"
    if shapes:
        changed = provider_table(choice.kind, card).changed(packages)
        other = f"; measured with {', '.join(changed)}: {again} again" if changed else ""
        return Decision(
            FIELD,
            "by shape",
            "facts",
            f"the fastest provider measured on {card} for each of {shapes} shapes; {candidates}; "
            f"other shapes: {choice.others}{other}",
            notable=bool(changed),
        )
    return Decision(
        FIELD,
        "rules",
        "facts",
        f"{_why_no_table(choice, card, triton)}: {choice.unmeasured}; {candidates}; {again}",
        notable=True,
    )


def _why_no_table(choice: GemmChoice, card: str, triton: str) -> str:
    """Return why no table is used on the GPU ``card``, as text. ``triton``: its version."""
    unfit = provider_table(choice.kind, card).unfit(triton)
    if unfit:
        return f"the table of {card} is not used ({unfit})"
    known = ", ".join(measured_cards(choice.kind))
    inapplicable = f" (those of {known} do not apply)" if known else ""
    return f"no measurements for {card}{inapplicable}"


def _candidates(choice: GemmChoice, packages: Mapping[str, str]) -> str:
    """Return text that lists the providers of ``choice``: the installed ones, then the others."""
    available = [
        name
        for name, needed in choice.candidates.items()
        if not needed or any(packages.get(each) for each in needed)
    ]
    absent = ", ".join(sorted(set(choice.candidates) - set(available)))
    not_installed = f" (not installed: {absent})" if absent else ""
    return f"candidates: {', '.join(available)}{not_installed}"


def table_path(kind: str, card: str) -> Path:
    """Return the path to which the fastest providers on the GPU ``card`` are written.

    ``kind``: prefix of the table's file name, as in :class:`GemmChoice`.
    """
    return tuned_tables.path_to_write(file_name(kind, card))


def measured(kind: str, card: str, triton: str | None = None) -> Table:
    """Return the table of fastest providers on the GPU ``card``, empty if none is used.

    Args:
        kind: prefix of the table's file name, as in :class:`GemmChoice`.
        card: name of the GPU.
        triton: version of Triton; None: the installed one.
    """
    found = provider_table(kind, card)
    version = installed(TRITON) if triton is None else triton
    return {} if found.unfit(version or "") else found.fastest


def measured_cards(kind: str) -> list[str]:
    """Return the names of the GPUs that have a table of fastest providers.

    ``kind``: prefix of the tables' file names, as in :class:`GemmChoice`.
    """
    return sorted(
        name.removesuffix(".json").partition("device_name=")[2].replace("_", " ")
        for name in tuned_tables.names()
        if name.startswith(f"{kind},device_name=")
    )


class ByShape:
    """The fastest measured provider for a GEMM [rows, depth] x [columns, depth]^T.

    The lookup takes the nearest shape, by the ratios of its sizes, and for that shape the nearest
    measured row count (the larger of two equally near ones). Shapes that were measured for less
    than half of the rows are passed over, unless all were.

    Args:
        kind: prefix of the table's name.
        rule: provider by row count where there is no table.
        table: measurements; None: those of the current GPU.
    """

    def __init__(self, kind: str, rule: RowRule, table: Table | None = None) -> None:
        self._rule = rule
        self._measured = by_shape(
            measured(kind, tuned_tables.device_name()) if table is None else table
        )
        self._picked: dict[tuple[int, int, int], str] = {}

    def pick(self, rows: int, columns: int, depth: int) -> str:
        """Return the name of the provider for the GEMM [rows, depth] x [columns, depth]^T."""
        shape = (rows, columns, depth)
        if shape not in self._picked:
            self._picked[shape] = self._find(*shape)
        return self._picked[shape]

    def _find(self, rows: int, columns: int, depth: int) -> str:
        if not self._measured:
            return self._rule.small if rows < self._rule.threshold else self._rule.large
        enough = [shape for shape, row in self._measured.items() if tuned_tables.near(row, rows)]
        near = min(
            enough or self._measured,
            key=lambda shape: (
                abs(math.log(shape[0] / columns)) + abs(math.log(shape[1] / depth)),
                shape,
            ),
        )
        return tuned_tables.nearest(self._measured[near], rows)


def by_shape(table: Table) -> dict[tuple[int, int], dict[int, str]]:
    """Return ``table`` with numbers as keys: {(N, K): {rows: fastest provider}}."""
    return {
        sizes(problem): {int(rows): name for rows, name in row.items()}
        for problem, row in table.items()
    }


def sizes(problem: str) -> tuple[int, int]:
    """Return N and K of ``problem``, for example "N=2112,K=7168"."""
    columns, depth = (int(part.partition("=")[2]) for part in problem.split(","))
    return columns, depth
