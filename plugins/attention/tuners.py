"""The tuner of decode attention, and the plan's remark on its tables."""

from __future__ import annotations

from collections.abc import Mapping

from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext, Tuner
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.plugins.attention.shared.attention_tables import plan_table, release

FIELD = "kernels.attention"


@hookimpl
def tuners() -> list[Tuner]:
    return [
        Tuner(
            "attention",
            "glowplug.plugins.attention.tuning.tuner:AttentionTuner",
            "KV splits and tiles of decode attention, and the fastest backend",
            "cuda",
        )
    ]


@hookimpl
def plan_remarks(context: CheckContext) -> list[Decision]:
    """Return a list with one note for the plan's table: the measured backend at each row count.

    The list is empty without a table for the plan's GPU, model and dtypes.
    """
    table = plan_table(context)
    if not table:
        return []
    fastest = [
        (rows, min(one["us"], key=lambda name: one["us"][name])) for rows, one in table.items()
    ]
    words = [
        f"{name} at {', '.join(str(rows) for rows, other in fastest if other == name)} rows"
        for name in dict.fromkeys(name for _, name in fastest)
    ]
    changed = _changed(table, context.facts.software.packages)
    other = f"; measured with {', '.join(changed)}: run `glowplug tune attention` again"
    card = context.facts.hardware.devices[0].name
    return [
        Decision(
            FIELD,
            "measured",
            "facts",
            f"fastest on {card}: {'; '.join(words)}{other if changed else ''}",
            notable=bool(changed),
        )
    ]


def _changed(table: Mapping[int, Config], packages: Mapping[str, str]) -> list[str]:
    """Return the packages whose installed version is another than the measured one, as text.

    Args:
        table: measurements by rows.
        packages: installed versions by package.
    """
    measured = {item for found in table.values() for item in found.get("versions", {}).items()}
    return sorted(
        f"{name} {version} (here {packages[name]})"
        for name, version in measured
        if packages.get(name) and release(packages[name]) != version
    )
