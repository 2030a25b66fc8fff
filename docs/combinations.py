"""The combinations page: built-ins over four small models and several fact sheets, as the plan
judges them.

No weight is read and no torch imported. What a GPU would say is not asked: a refusal here is the
plan's own.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet

SHEETS = ("cpu", "1xh200", "8xh200")
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")
CROSSED = (
    "attention",
    "quantization",
    "cache",
)  #: slots whose components are all combined, "auto" among them
ONE_BY_ONE = (
    "weights",
    "collectives",
    "speculative",
    "scheduler",
    "policy",
    "graphs",
    "sampling",
    "executor",
    "ops",
)


@dataclass
class Tally:
    """Admitted and refused by (sheet, model); each kind of refusal with how often and one example."""

    admitted: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    fixes: dict[tuple[str, str, str], str] = field(default_factory=dict)


def names(plugins: PluginSet, slot: str) -> list[str]:
    """What ``use`` may say; without components that need a package of their own, which ``auto``
    alone brings in.
    """
    return [
        "auto",
        *(
            found.component.name
            for found in plugins.components(slot)
            if not found.component.requires
        ),
    ]


def configurations(plugins: PluginSet) -> Iterator[dict[str, Any]]:
    """Without the model: the cross product of what interacts, then every other component in turn."""
    axes = [names(plugins, slot) for slot in CROSSED]
    for dtype, kv_dtype, *uses in itertools.product(DTYPES, KV_DTYPES, *axes):
        config: dict[str, Any] = {slot: {"use": use} for slot, use in zip(CROSSED, uses)}
        config["attention"]["kv_dtype"] = kv_dtype
        yield {"dtype": dtype, **config}
    for slot in ONE_BY_ONE:
        for use in names(plugins, slot):
            for dtype, overlap in itertools.product(DTYPES, (True, False)):
                config = {"dtype": dtype, slot: {"use": use}}
                config["scheduler"] = {**config.get("scheduler", {}), "overlap": overlap}
                yield config


def judge(plugins: PluginSet, models: dict[str, Path]) -> Tally:
    tally = Tally()
    for sheet, (model, folder) in itertools.product(SHEETS, models.items()):
        hardware = read_sheet(sheet)
        for config in configurations(plugins):
            whole = {
                "weights": {"use": "random"},
                "skip_tokenizer": True,
                **config,
                "model": str(folder),
            }
            try:
                make_plan(whole, plugins=plugins, hardware=hardware)
            except PlanRefused as error:
                tally.refused[sheet, model] += 1
                for refusal in error.refusals:
                    _count(tally, refusal, str(folder))
            else:
                tally.admitted[sheet, model] += 1
    return tally


def _count(tally: Tally, refusal: Refusal, folder: str) -> None:
    reason = re.sub(r"(?<!\w)\d+(\.\d+)?(?!\w)", "N", refusal.reason.replace(folder, "MODEL"))
    key = (refusal.field, refusal.by, reason)
    tally.kinds[key] += 1
    tally.fixes.setdefault(key, refusal.fix.replace(folder, "MODEL"))


def page(plugins: PluginSet, configs: dict[str, dict[str, Any]], table: Any) -> str:
    """``configs``: config.json by model name. ``table(head, rows)`` makes a Markdown table."""
    with tempfile.TemporaryDirectory() as place:
        models = {}
        for name, config in configs.items():
            folder = Path(place) / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            models[name] = folder
        tally = judge(plugins, models)
    total = sum(tally.admitted.values()) + sum(tally.refused.values())
    counts = [
        (sheet, model, tally.admitted[sheet, model], tally.refused[sheet, model])
        for sheet in SHEETS
        for model in models
    ]
    kinds = [
        (f"`{field}`", by, reason, tally.fixes[field, by, reason], count)
        for (field, by, reason), count in sorted(
            tally.kinds.items(), key=lambda item: (item[0], -item[1])
        )
    ]
    return "\n".join(
        [
            "# Combinations\n",
            f"{total} combinations of the built-in plugins, planned for {len(SHEETS)} fact sheets "
            f"and {len(models)} small models of the supported kinds: every attention backend, "
            "quantization scheme and "
            "cache with every dtype and KV dtype, and each component of the other slots in turn; "
            "without components that need a package "
            "of their own, but as what `auto` may choose. A combination is admitted or refused; an "
            "admitted one must run. `tests/plan` boots a sample of a "
            "matrix like this on the CPU (all of it under its `slow` mark), "
            "`tests.gpu.combinations` those of [one GPU](benchmarks/README.md#one-gpu-combinations).\n",
            table(("machine", "model", "admitted", "refused"), counts),
            "## Why combinations are refused\n",
            "One row a kind of reason, numbers replaced by N. A combination may have several. The fix is "
            "that of the first one met.\n",
            table(("field", "by", "reason", "fix", "times"), kinds),
        ]
    )
