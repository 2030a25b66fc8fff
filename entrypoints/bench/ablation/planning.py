"""Plans of an ablation's rows, made before any row runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.model_folder import EMBEDDED
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.bench.ablation.load import AblationLoad
from glowplug.entrypoints.bench.ablation.rows import Settings, label
from glowplug.entrypoints.bench.ablation.techniques import MARK, OFF, ON, columns, with_settings
from glowplug.entrypoints.cli.flags.command_line import attention_backend

#: least default context length, if the model supports it
MIN_CONTEXT = 4096


@dataclass(frozen=True)
class PlannedRow:
    """A row of the table with its plan.

    Attributes:
        number: number of the row, from 1.
        settings: values of techniques.
        config: the engine's configuration, as keywords of ``LLM``.
        plan: the plan; None if it was refused.
        refusals: every reason of a refusal; () if there is a plan.
        same_as: number of an earlier row with the same plan; 0 if there is none.
    """

    number: int
    settings: Settings
    config: dict[str, Any]
    plan: EnginePlan | None
    refusals: tuple[Refusal, ...] = ()
    same_as: int = 0

    @property
    def fingerprint(self) -> str:
        """The plan's fingerprint; "" without a plan."""
        return self.plan.fingerprint if self.plan else ""


def base_config(given: Mapping[str, Any], load: AblationLoad, positions: int) -> dict[str, Any]:
    """Return the configuration of the base: the operator's, with defaults that fit the load.

    There is room for the highest concurrency, and every rank has a process of its own.

    Args:
        given: the operator's configuration.
        load: the requests.
        positions: most positions of the model.
    """
    config = {
        "model": EMBEDDED,
        "context_length": min(positions, max(MIN_CONTEXT, (load.input_len or 0) + load.output_len)),
        **given,
    }
    if load.input_len is not None:
        config.setdefault("skip_tokenizer", True)
    sections: dict[str, dict[str, Any]] = {
        "executor": {"use": "multiprocess"},
        "scheduler": {"max_running_requests": max((1, *load.levels))},
    }
    return config | {
        name: {**defaults, **config.get(name, {})} for name, defaults in sections.items()
    }


def plan_rows(
    rows: Sequence[Settings], base: Mapping[str, Any], plugins: PluginSet
) -> list[PlannedRow]:
    """Plan every row.

    Raises:
        ValueError: a row has an unknown technique, or a value that a technique cannot have.
    """
    first: dict[str, int] = {}
    found = []
    for number, settings in enumerate(rows, 1):
        config = with_settings(base, settings)
        if "attention" in settings:
            backend = attention_backend(settings["attention"], str(config["model"]), plugins)
            config["attention"]["use"] = backend
        try:
            made = _plan(config, plugins, label(settings))
        except PlanRefused as refused:
            found.append(PlannedRow(number, settings, config, None, refused.refusals))
            continue
        same = first.setdefault(made.fingerprint, number)
        found.append(
            PlannedRow(number, settings, config, made, same_as=same if same != number else 0)
        )
    return found


def _plan(config: Mapping[str, Any], plugins: PluginSet, source: str) -> EnginePlan:
    """Return the plan that ``LLM`` makes of a row's configuration.

    Raises:
        PlanRefused: the configuration cannot run.
    """
    from glowplug.entrypoints.front.llm import UNUSED_SECTIONS

    given = {key: value for key, value in config.items() if key != "plugins"}
    return make_plan(given, source=source, plugins=plugins, unused=UNUSED_SECTIONS)


def technique_cells(row: PlannedRow, base: PlannedRow) -> dict[str, str]:
    """Return the row's cells by technique: the state in its plan.

    Without a plan, the cells are those of the base, with the row's settings in place.

    Args:
        row: the row.
        base: the table's first row.
    """
    shown = columns(set(row.settings) | set(base.settings))
    if row.plan is not None:
        return {one.name: one.cell(row.plan) for one in shown}
    start = {one.name: one.cell(base.plan) for one in shown} if base.plan else {}
    marks = {ON: MARK, OFF: ""}
    return start | {name: marks.get(value, value) for name, value in row.settings.items()}
