"""Says in the plan whether tiles measured on this card are used: a table of another card or Triton
version never is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.launch.cards import TILES
from glowplug.plugins.quantization.shared import (
    expert_provider_choice as experts_order,
    provider_choice as gemm_order,
)

MADE_FOR = re.compile(r"device_name=(?P<card>[^,]+),.*triton=(?P<triton>[\d.]+)\.json")
FIELD = "kernels.tables"
HEAD = "kernels.head"


@hookimpl
def plan_remarks(context: CheckContext) -> list[Decision]:
    """Are tiles measured, and who multiplies: on cards that these kernels are made for, where
    Triton is installed.
    """
    version = context.facts.software.packages.get("triton", "")
    devices = context.facts.hardware.devices
    cards = {device.name for device in devices}
    if (
        context.values["device"] != "cuda"
        or not version
        or not cards
        or {device.compute for device in devices} - TILES
    ):
        return []
    tables = made_for(path.name for path in tuned.FOLDER.glob("*.json"))
    others = (
        gemm_order.remark(context),
        experts_order.remark(context),
        head_remark(context, min(cards), version),
    )
    return [remark(cards, tuned.minor(version), tables), *(each for each in others if each)]


def made_for(names: Iterable[str]) -> set[tuple[str, str]]:
    """(card, Triton version) of each table among file ``names``."""
    found = (MADE_FOR.search(name) for name in names)
    return {(match["card"].replace("_", " "), match["triton"]) for match in found if match}


def remark(cards: set[str], version: str, tables: set[tuple[str, str]]) -> Decision:
    """``cards`` and Triton ``version`` of the plan; ``tables``: those that there are tables for."""
    here = f"{', '.join(sorted(cards))} with Triton {version}"
    if all((card, version) in tables for card in cards):
        return Decision(
            FIELD, "measured", "facts", f"tiles of Triton kernels as measured on {here}"
        )
    others = (
        ", ".join(f"{card} with Triton {triton}" for card, triton in sorted(tables)) or "nothing"
    )
    return Decision(
        FIELD,
        "rules",
        "facts",
        f"tables are of {others}, this is {here}, where they are not trusted; "
        "`glowplug tune moe`, fp8-gemm and fp8-moe measure here",
        notable=True,
    )


def head_remark(context: CheckContext, card: str, version: str) -> Decision | None:
    """Whose kernels score every token in a decoding step, where it is not cuBLAS for any number of
    rows.
    """
    model = context.facts.model
    table = (
        tuned.table(tuned.head_file_name(model.vocab_size, model.hidden_size, (card, version)))
        or {}
    )
    ours = [str(rows) for rows, config in table.items() if config["way"] != tuned.CUBLAS]
    if not ours or context.values["dtype"] != "bfloat16":
        return None
    return Decision(
        HEAD,
        "by rows",
        "facts",
        f"a kernel of our own at {', '.join(ours)} rows, as measured on {card} "
        f"for {model.vocab_size} x {model.hidden_size}, and at numbers near them; cuBLAS at others",
    )
