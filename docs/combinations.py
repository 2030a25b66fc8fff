"""Generate the combinations page: the built-in plugins over four small models and three machines.

Each combination is planned for a fact sheet. No weight is read, torch is not imported, and no GPU
is needed: every refusal on the page is the plan's own.
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

#: fact sheet -> tensor-parallel ranks that its combinations are planned for
RANKS = {"cpu": 1, "1xh200": 1, "8xh200": 8}
#: sizes of the small models that have to split over 8 ranks, in whole quantization blocks of 128
SPLIT_SIZES = {
    "num_attention_heads": 128,
    "num_key_value_heads": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
}
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")
#: slots whose components are all combined with one another, "auto" included
CROSSED = ("attention", "quantization")
#: slots whose components are varied one slot at a time
ONE_BY_ONE = (
    "cache",
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
#: strategies of several ranks beside "tensor", which are varied in the same way
BESIDE_TENSOR = (("ep_moe",), ("dp_attention",), ("ep_moe", "dp_attention"))


@dataclass
class Tally:
    """Counts of combinations and refusals.

    Attributes:
        admitted: combinations that the plan admits, by (sheet, model).
        refused: combinations that the plan refuses, by (sheet, model).
        kinds: refusals by (field, component, reason with numbers replaced).
        fixes: the fix of the first refusal of each kind.
    """

    admitted: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    fixes: dict[tuple[str, str, str], str] = field(default_factory=dict)


def names(plugins: PluginSet, slot: str) -> list[str]:
    """Return the values of ``use`` for a slot: "auto" and its components.

    Components that require a package are left out; ``auto`` alone brings them in.
    """
    return [
        "auto",
        *(
            found.component.name
            for found in plugins.components(slot)
            if not found.component.requires
        ),
    ]


def configurations(plugins: PluginSet, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield configurations without the model.

    First the cross product of the slots that interact, then the components of every other slot in
    turn, and for several ranks the other parallel strategies.
    """
    parallel = _strategies(ranks) if ranks > 1 else []
    for config in _one_strategy(plugins):
        yield {**config, "parallel": parallel} if parallel else config
    for others in BESIDE_TENSOR if parallel else ():
        for dtype, overlap in itertools.product(DTYPES, (True, False)):
            yield {
                "dtype": dtype,
                "scheduler": {"overlap": overlap},
                "parallel": _strategies(ranks, *others),
            }


def _strategies(ranks: int, *others: str) -> list[dict[str, Any]]:
    return [{"use": use, "size": ranks} for use in ("tensor", *others)]


def _one_strategy(plugins: PluginSet) -> Iterator[dict[str, Any]]:
    """Yield the configurations that differ in anything but the parallel strategies."""
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
    """Plan every combination for every machine and model (name -> folder) and count the results."""
    tally = Tally()
    for (sheet, ranks), (model, folder) in itertools.product(RANKS.items(), models.items()):
        hardware = read_sheet(sheet)
        for config in configurations(plugins, ranks):
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
    """Return the page's text.

    Args:
        plugins: the built-in plugins.
        configs: config.json by model name.
        table: ``table(head, rows)`` returns a Markdown table.
    """
    with tempfile.TemporaryDirectory() as place:
        models = {}
        for name, config in configs.items():
            folder = Path(place) / name
            folder.mkdir()
            sizes = {key: SPLIT_SIZES.get(key, value) for key, value in config.items()}
            (folder / "config.json").write_text(json.dumps(sizes))
            models[name] = folder
        tally = judge(plugins, models)
    total = sum(tally.admitted.values()) + sum(tally.refused.values())
    counts = [
        (sheet, ranks, model, tally.admitted[sheet, model], tally.refused[sheet, model])
        for sheet, ranks in RANKS.items()
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
            f"{total} combinations of the built-in plugins, planned for {len(RANKS)} machines and "
            f"{len(models)} small models of the supported kinds. They combine every attention "
            "backend and quantization scheme with every dtype and KV dtype; the components of the "
            "other slots are then varied one at a time. On 8 GPUs every combination is "
            "planned for 8 tensor-parallel ranks, and expert parallelism, data-parallel attention "
            "and both are added. Components that need a package of their own occur only where "
            "`auto` chooses them.\n",
            "Each combination is either admitted or refused, and an admitted one must run. "
            "`tests/plan` starts a sample of a similar matrix on the CPU (all of it under the "
            "`slow` mark); `tests.gpu.combinations` runs those of "
            "[one GPU](benchmarks/README.md#one-gpu-combinations).\n",
            table(("machine", "ranks", "model", "admitted", "refused"), counts),
            "## Why combinations are refused\n",
            "One row per kind of reason, with numbers replaced by N. A combination may be refused "
            "for several reasons. The fix shown is that of the first combination.\n",
            table(("field", "by", "reason", "fix", "times"), kinds),
        ]
    )
