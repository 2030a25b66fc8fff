"""The plan's remarks on tuned tables: measured tile sizes and measured GEMM providers.

A table measured on another GPU or with another Triton version is never used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.cards import TILES
from glowplug.plugins.quantization.shared import expert_provider_choice, provider_choice

TABLE_NAME = re.compile(r"device_name=(?P<card>[^,]+),.*triton=(?P<triton>[\d.]+)\.json")
ATTENTION = "attention="  #: beginning of the names of tables of decode attention
FIELD = "kernels.tables"
FILES_FIELD = "kernels.table_files"
HEAD_FIELD = "kernels.head"


@hookimpl
def plan_remarks(context: CheckContext) -> list[Decision]:
    """Return notes for the plan's table on how tile sizes and GEMM providers are chosen.

    The list is empty unless our Triton kernels run on all GPUs of the plan.
    """
    version = context.facts.software.packages.get("triton", "")
    devices = context.facts.hardware.devices
    cards = {device.name for device in devices}
    if (
        context.values.device != "cuda"
        or not version
        or not cards
        or {device.compute for device in devices} - TILES
    ):
        return []
    tables = made_for(tuned_tables.names())
    others = (
        provider_choice.remark(context),
        expert_provider_choice.remark(context),
        head_remark(context, min(cards), version),
    )
    noted = remark(cards, tuned_tables.minor(version), tables)
    return [noted, *folder_remark(), *(each for each in others if each)]


def folder_remark() -> list[Decision]:
    """Return a note on the user's tables, and on files that are no tables; [] if there are none."""
    folder = tuned_tables.user_folder()
    count = len(list(folder.glob("*.json")))
    broken = tuned_tables.unreadable()
    why = [f"{count} files in {folder} replace packaged ones of the same name"] if count else []
    why += [f"{message}; it is ignored" for message in broken]
    if not why:
        return []
    value = "the user's first" if count else "packaged"
    return [Decision(FILES_FIELD, value, "facts", "; ".join(why), notable=bool(broken))]


def made_for(names: Iterable[str]) -> set[tuple[str, str]]:
    """Return the (GPU, Triton version) of each table of tile sizes among file names ``names``."""
    found = (TABLE_NAME.search(name) for name in names if not name.startswith(ATTENTION))
    return {(match["card"].replace("_", " "), match["triton"]) for match in found if match}


def remark(cards: set[str], version: str, tables: set[tuple[str, str]]) -> Decision:
    """Return a note on what sets the tile sizes on the GPUs: measured tables or built-in rules.

    Args:
        cards: names of the plan's GPUs.
        version: the plan's Triton version.
        tables: (GPU, Triton version) pairs that have tables of tile sizes.
    """
    here = f"{', '.join(sorted(cards))} with Triton {version}"
    if all((card, version) in tables for card in cards):
        return Decision(FIELD, "measured", "facts", f"Triton tile sizes measured on {here}")
    others = (
        ", ".join(f"{card} with Triton {triton}" for card, triton in sorted(tables)) or "nothing"
    )
    return Decision(
        FIELD,
        "rules",
        "facts",
        f"the tables are for {others} and do not apply to {here}; "
        "`glowplug tune moe`, fp8-gemm and fp8-moe measure this GPU",
        notable=True,
    )


def head_remark(context: CheckContext, card: str, version: str) -> Decision | None:
    """Return a note on the row counts at which our own kernel, not cuBLAS, computes the LM head.

    Returns:
        The note, for decode steps; None if cuBLAS computes it at every row count.
    """
    model = context.facts.model
    table = (
        tuned_tables.table(
            tuned_tables.head_file_name(model.vocab_size, model.hidden_size, (card, version))
        )
        or {}
    )
    ours = [str(rows) for rows, config in table.items() if config["way"] != tuned_tables.CUBLAS]
    if not ours or context.values.dtype != "bfloat16":
        return None
    return Decision(
        HEAD_FIELD,
        "by rows",
        "facts",
        f"our own kernel at or near {', '.join(ours)} rows, cuBLAS at others, as measured on "
        f"{card} for {model.vocab_size} x {model.hidden_size}",
    )
