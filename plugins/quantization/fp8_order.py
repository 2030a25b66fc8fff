"""In which order libraries are asked to multiply linear layers in block FP8, and how the plan says so. No torch."""
from __future__ import annotations

import json
from collections.abc import Mapping

from glowplug.core.component import CheckContext
from glowplug.core.plan import Decision
from glowplug.kernels.cards import LIBRARIES as LIBRARY_CARDS, TILES
from glowplug.kernels.triton.tuned import FOLDER, spelt
from glowplug.plugins.quantization.block_fp8 import LIBRARIES, BlockFp8Options

FIELD = "quantization.gemm"
FEW = 64
#: orders for shapes that nobody has measured, up to FEW rows and above; compilers at first use come last
UNMEASURED_FEW = ("triton",)
UNMEASURED = ("cublas", "cutlass", "triton")


def table_name(card: str) -> str:
    """File of who was fastest on ``card``, by shape and rows."""
    return f"fp8_gemm,device_name={spelt(card)}.json"


def remark(context: CheckContext) -> Decision | None:
    """Who multiplies where ``quantization.gemm`` is left to be chosen, and of what is installed it is chosen."""
    machine, scheme = context.facts.hardware, context.chosen.get("quantization", ())
    cards = {card.compute for card in machine.devices}
    options = scheme[0].options if scheme else None
    if not isinstance(options, BlockFp8Options) or options.gemm != "auto" or options.activations == "none":
        return None
    if context.values["device"] != "cuda" or not cards <= TILES:
        return None
    if not cards <= LIBRARY_CARDS:
        return Decision(FIELD, "triton", "facts", "other libraries' products were not tried on this card")
    packages = context.facts.software.packages
    here = [name for name, needed in LIBRARIES.items() if any(packages.get(package) for package in needed)]
    absent = ", ".join(sorted(set(LIBRARIES) - set(here)))
    among = f"of {', '.join([*here, 'cublas'])}" + (f" (not installed: {absent})" if absent else "")
    shapes = [len(measured(card.name)) for card in machine.devices]
    unmeasured = f"triton up to {FEW} rows, then the first of {', '.join(UNMEASURED)} that is there"
    if not min(shapes, default=0):
        return Decision(FIELD, "rules", "facts", f"nobody was measured on {machine.devices[0].name}: {unmeasured}; "
                        f"{among}; `glowplug tune fp8-gemm` measures")
    return Decision(FIELD, "by shape", "facts", f"for {min(shapes)} shapes whoever was measured fastest on "
                    f"{machine.devices[0].name}, {among}; for others {unmeasured}")


def measured(card: str) -> Mapping[str, Mapping[str, str]]:
    """{"N=2112,K=7168": {rows: the fastest}} of a card; empty where nobody has measured."""
    path = FOLDER / table_name(card)
    found: Mapping[str, Mapping[str, str]] = json.loads(path.read_text()) if path.is_file() else {}
    return found
