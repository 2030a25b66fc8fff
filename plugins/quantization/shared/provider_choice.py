"""Who is asked to multiply linear layers of quantised weights: whoever was measured fastest, by
tables of shape and rows, one a kind of product and card; and how the plan says so. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.options import QuantizationOptions
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.launch.cards import LIBRARIES as LIBRARY_CARDS, TILES
from glowplug.plugins.quantization.awq.plugin import AwqOptions
from glowplug.plugins.quantization.block_fp8.plugin import LIBRARIES, BlockFp8Options
from glowplug.plugins.quantization.int8.plugin import LIBRARIES as INT8_LIBRARIES, W8A8Int8Options

FIELD = "quantization.gemm"
FEW = 64
#: orders for shapes in block FP8 that nobody has measured, up to FEW rows and above; compilers at
#: first use come last
UNMEASURED_FEW = ("triton",)
UNMEASURED = ("cublas", "cutlass", "triton")

Table = Mapping[str, Mapping[str, str]]  #: {"N=2112,K=7168": {rows: the fastest}}


@dataclass(frozen=True)
class ByRows:
    """Where a card has no table."""

    few: str
    many: str
    least: int  #: rows that are many

    def __str__(self) -> str:
        return f"{self.few} below {self.least} rows, {self.many} from there on"


@dataclass(frozen=True)
class Choice:
    """Attributes:
    kind: how the names of its tables begin.
    among: packages of everybody that is chosen from; (): they are always there.
    unmeasured: the rule where a card has no table.
    others: who multiplies shapes that a card's table does not have.
    everywhere: nobody needs one of the cards that libraries' 8-bit products were tried on.
    """

    kind: str
    among: Mapping[str, tuple[str, ...]]
    unmeasured: str | ByRows
    others: str = "the nearest shape's"
    everywhere: bool = False

    @property
    def tuner(self) -> str:
        return self.kind.replace("_", "-")


_FP8_RULE = f"triton up to {FEW} rows, then the first of {', '.join(UNMEASURED)} that is there"
FP8 = Choice("fp8_gemm", {**LIBRARIES, "cublas": ()}, _FP8_RULE, _FP8_RULE)
INT8_ROWS = ByRows("triton", "cutlass", 64)
AWQ_ROWS = ByRows("triton", "cublas", 512)
INT8 = Choice("int8_gemm", INT8_LIBRARIES, INT8_ROWS)
AWQ = Choice("awq_gemm", {"triton": (), "cublas": ()}, AWQ_ROWS, everywhere=True)
#: of options and those that inherit them
CHOICES: Mapping[type[QuantizationOptions], Choice] = {
    BlockFp8Options: FP8,
    W8A8Int8Options: INT8,
    AwqOptions: AWQ,
}


def on_device(context: CheckContext) -> QuantizationOptions | None:
    """Options of the plan's scheme, where weights stay as narrow on CUDA devices as they are
    stored.
    """
    for scheme in context.chosen.get("quantization", ())[:1]:
        options = scheme.options
        offers = scheme.offers
        if isinstance(options, QuantizationOptions) and isinstance(offers, QuantizationOffers):
            return None if options.dequantizes("cuda", offers) else options
    return None


def remark(context: CheckContext) -> Decision | None:
    """Who multiplies where ``quantization.gemm`` is left to be chosen, and of what is installed it
    is chosen.
    """
    machine = context.facts.hardware
    options = on_device(context)
    cards = {card.compute for card in machine.devices}
    if (
        not isinstance(options, BlockFp8Options | W8A8Int8Options | AwqOptions)
        or options.gemm != "auto"
    ):
        return None
    choice = next(choice for kind, choice in CHOICES.items() if isinstance(options, kind))
    if context.values["device"] != "cuda" or not cards <= TILES:
        return None
    if not choice.everywhere and not cards <= LIBRARY_CARDS:
        return Decision(
            FIELD,
            "triton",
            "facts",
            "other libraries' products were not tried on this card",
            notable=True,
        )
    among = _among(choice, context.facts.software.packages)
    shapes = min((len(measured(choice.kind, card.name)) for card in machine.devices), default=0)
    card = machine.devices[0].name
    if not shapes:
        known = ", ".join(measured_cards(choice.kind))
        refused = f", and tables of {known} are not trusted there" if known else ""
        return Decision(
            FIELD,
            "rules",
            "facts",
            f"nobody was measured on {card}{refused}: {choice.unmeasured}; "
            f"{among}; `glowplug tune {choice.tuner}` measures",
            notable=True,
        )
    return Decision(
        FIELD,
        "by shape",
        "facts",
        f"for {shapes} shapes whoever was measured fastest on {card}, {among}; "
        f"for others {choice.others}",
    )


def _among(choice: Choice, packages: Mapping[str, str]) -> str:
    here = [
        name
        for name, needed in choice.among.items()
        if not needed or any(packages.get(each) for each in needed)
    ]
    absent = ", ".join(sorted(set(choice.among) - set(here)))
    return f"of {', '.join(here)}" + (f" (not installed: {absent})" if absent else "")


def table_path(kind: str, card: str) -> Path:
    """File of who was fastest on ``card``, by shape and rows."""
    return tuned.FOLDER / f"{kind},device_name={tuned.spelt(card)}.json"


def measured(kind: str, card: str) -> Table:
    """Empty where nobody has measured."""
    path = table_path(kind, card)
    found: Table = json.loads(path.read_text()) if path.is_file() else {}
    return found


def measured_cards(kind: str) -> list[str]:
    """Names of the cards that there are tables for."""
    return sorted(
        path.stem.partition("device_name=")[2].replace("_", " ")
        for path in tuned.FOLDER.glob(f"{kind},device_name=*.json")
    )


class ByShape:
    """Who multiplies [rows, depth] x [columns, depth]^T: the fastest at the nearest measured shape,
    by the ratios of its sizes, and there at the nearest number of rows, the larger of two as near.
    Without a table ``rule`` says.
    ``table``: None: the current card's.
    """

    def __init__(self, kind: str, rule: ByRows, table: Table | None = None) -> None:
        self._rule = rule
        self._measured = by_shape(measured(kind, tuned.device_name()) if table is None else table)
        self._picked: dict[tuple[int, int, int], str] = {}

    def pick(self, rows: int, columns: int, depth: int) -> str:
        shape = (rows, columns, depth)
        if shape not in self._picked:
            self._picked[shape] = self._find(*shape)
        return self._picked[shape]

    def _find(self, rows: int, columns: int, depth: int) -> str:
        if not self._measured:
            return self._rule.few if rows < self._rule.least else self._rule.many
        near = min(
            self._measured,
            key=lambda shape: (
                abs(math.log(shape[0] / columns)) + abs(math.log(shape[1] / depth)),
                shape,
            ),
        )
        return tuned.nearest(self._measured[near], rows)


def by_shape(table: Table) -> dict[tuple[int, int], dict[int, str]]:
    """{(N, K): {rows: the fastest}}."""
    return {
        sizes(problem): {int(rows): name for rows, name in row.items()}
        for problem, row in table.items()
    }


def sizes(problem: str) -> tuple[int, int]:
    """N and K of ``problem``."""
    columns, depth = (int(part.partition("=")[2]) for part in problem.split(","))
    return columns, depth
