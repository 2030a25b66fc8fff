"""The techniques that an ablation compares: the columns of its table.

Each has a name, values, an effect on the configuration, and a cell that shows its state in a plan.
A name with a dot, such as ``scheduler.max_running_requests``, stands for that configuration field.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from glowplug.core.config.files import set_path
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.offers import SpeculativeOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.plugin.speculative_options import SpeculativeOptions
from glowplug.entrypoints.cli.flags.layer import literal, value_at

Config = dict[str, Any]
ON, OFF = "on", "off"
KNOBS = ("steps", "topk", "draft_tokens")  #: options for the size of drafts
MARK = "x"  #: cell of a technique that is on
WHOLE_STEP = 32768  #: most prompt tokens of a step without chunked prefill
TENSOR = "tensor"
STRATEGIES = (TENSOR, "ep_moe", "dp_attention")  #: order of the sections of ``parallel``


@dataclass(frozen=True)
class Technique:
    """A technique that can be varied.

    Attributes:
        name: name on the command line and in files of rows.
        title: heading of its column.
        values: values that are compared unless others are given; (): those of the model
            (``compared_values``).
        accepts: the values that it can have, for messages.
        apply: changes a configuration to a value; raises ValueError for a wrong value.
        cell: text of a plan's cell in the column.
    """

    name: str
    title: str
    values: tuple[str, ...]
    accepts: str
    apply: Callable[[Config, str], None]
    cell: Callable[[EnginePlan], str]


def _section(config: Config, name: str) -> Config:
    """Return a section of ``config``, which is added if it is missing."""
    section: Config = config.setdefault(name, {})
    return section


def _number(text: str, least: int = 1) -> int:
    """Parse an integer of at least ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"expected an integer of at least {least}, not {text!r}")
    return int(text)


def _is_on(text: str) -> bool:
    """Parse "on" or "off"."""
    if text not in (ON, OFF):
        raise ValueError(f"expected on or off, not {text!r}")
    return text == ON


def component_switch(name: str, title: str, section: str, on: str, off: str) -> Technique:
    """Return the technique that is one component of a slot, in place of another one.

    Args:
        name: name of the technique.
        title: heading of its column.
        section: section of the configuration, and name of the slot.
        on: component that is the technique.
        off: component without it, or "auto".
    """

    def apply(config: Config, value: str) -> None:
        # the options of the section belong to the other component
        config[section] = {"use": on if _is_on(value) else off}

    def cell(plan: EnginePlan) -> str:
        return MARK if plan.choice(section).name == on else ""

    return Technique(name, title, (ON, OFF), "on, off", apply, cell)


def _ranks(config: Config) -> int:
    """Return the number of tensor-parallel ranks of ``config``."""
    sizes = {one.get("use"): one.get("size", 1) for one in config.get("parallel", ())}
    return int(sizes.get(TENSOR, 1))


def _parallel(use: str, title: str, axis: str) -> Technique:
    """Return the technique that distributes the model by the strategy ``use``.

    Args:
        use: the strategy.
        title: heading of its column.
        axis: its axis in the plan's mesh, and name of the technique.
    """

    def apply(config: Config, value: str) -> None:
        size = 1 if value == OFF else _ranks(config) if value == ON else _number(value)
        given = {one["use"]: one for one in config.get("parallel", ())}
        given.pop(use, None)
        if size > 1 or value == ON:
            given[use] = {"use": use, "size": size}
        known = [given.pop(name) for name in STRATEGIES if name in given]
        config["parallel"] = [*known, *given.values()]

    def cell(plan: EnginePlan) -> str:
        size = plan.mesh.get(axis, 1)
        return str(size) if size > 1 else ""

    accepts = "on (every rank), off, a number of ranks"
    return Technique(axis, title, (OFF, ON), accepts, apply, cell)


def _apply_attention(config: Config, value: str) -> None:
    _section(config, "attention")["use"] = value


def _knobs(text: str) -> dict[str, int]:
    """Parse the size of drafts, steps or ``STEPS/TOPK/TOKENS``, into options."""
    found = [_number(part, 0) for part in text.split("/")]
    if len(found) not in (1, 3):
        raise ValueError(f"expected steps or STEPS/TOPK/TOKENS, not {text!r}")
    return dict(zip(KNOBS, found))


def _apply_nextn(config: Config, value: str) -> None:
    """Set drafts of the next-token layer: ``off``, ``on``, steps, or ``STEPS/TOPK/TOKENS``."""
    given = _section(config, "speculative")
    knobs = _knobs({ON: "1", OFF: "0"}.get(value, value))
    for name in KNOBS:
        given.pop(name, None)
    if not knobs["steps"]:
        config["speculative"] = {"use": "none"}
        return
    given |= {"use": "nextn", **knobs}


def _apply_drafts(config: Config, value: str) -> None:
    """Set the algorithm of drafts: ``ALGORITHM[:SIZE][@FOLDER]``.

    The options of the configuration's own algorithm are kept for this algorithm only, except
    ``adaptive``, which all of them have.
    """
    words, at, folder = value.partition("@")
    name, colon, size = words.partition(":")
    if not name or (at and not folder) or (colon and not size):
        raise ValueError(f"expected ALGORITHM[:SIZE][@FOLDER], not {value!r}")
    given = config.get("speculative", {})
    same = given.get("use") == name
    kept = {key: given[key] for key in given if same or key == "adaptive"}
    sizes = _knobs(size) if size else {key: kept[key] for key in KNOBS if key in kept}
    others = {key: kept[key] for key in kept if key not in KNOBS}
    folders = {"draft_model": folder} if folder else {}
    config["speculative"] = {**others, "use": name, **sizes, **folders}


def _drafts_of(plugins: PluginSet, model: str) -> tuple[str, ...]:
    """Return the algorithms of drafts that need no folder, or have one for the model."""
    facts = plugins.read_model(model).facts

    def fits(component: Component) -> bool:
        offers = component.offers
        if not isinstance(offers, SpeculativeOffers):
            return False
        missing = offers.nextn_layer and not facts.nextn_layers
        if not (missing or offers.eagle_head or offers.whole_model):
            return True
        options = component.options(use=component.name)
        return isinstance(options, SpeculativeOptions) and bool(options.draft_for(facts.path))

    components = [one.component for one in plugins.components("speculative")]
    return tuple(one.name for one in components if fits(one))


def _sizes_of(algorithm: str) -> Callable[[EnginePlan], str]:
    """Return the function from a plan to the size of its drafts by ``algorithm``; "" by others."""

    def cell(plan: EnginePlan) -> str:
        return _shape(plan) if plan.choice("speculative").name == algorithm else ""

    return cell


def _drafts_cell(plan: EnginePlan) -> str:
    """Return the algorithm of drafts and their size."""
    shape = _shape(plan)
    return f"{plan.choice('speculative').name} {shape}" if shape else ""


def _shape(plan: EnginePlan) -> str:
    shape = plan.sizes.draft_shape
    return str(shape) if shape.steps else ""


def _apply_overlap(config: Config, value: str) -> None:
    _section(config, "scheduler")["overlap"] = _is_on(value)


def _apply_chunks(config: Config, value: str) -> None:
    """Set the chunks of prompts: ``on``, ``off``, or the most prompt tokens of a step.

    Off means that prompts are computed whole, in steps without decoding rows.
    """
    given = _section(config, "scheduler")
    given.pop("mixed", None)
    given.pop("chunk_size", None)
    if value == OFF:
        given |= {"mixed": False, "chunk_size": max(WHOLE_STEP, config.get("context_length") or 0)}
    elif value != ON:
        given["chunk_size"] = _number(value)


def _chunks_cell(plan: EnginePlan) -> str:
    mixed = plan.choice("scheduler").options.get("mixed", True)
    return str(plan.sizes.chunk_size) if mixed else "whole"


def _apply_cache_dtype(config: Config, value: str) -> None:
    dtypes = {ON: "fp8_e4m3", OFF: "auto"}
    _section(config, "attention")["kv_dtype"] = dtypes.get(value, value)


def _cache_dtype_cell(plan: EnginePlan) -> str:
    return plan.kv_dtype.removeprefix("fp8_") if "8" in plan.kv_dtype else ""


#: in the order in which they are applied and shown
TECHNIQUES: tuple[Technique, ...] = (
    replace(_parallel(TENSOR, "TP", "tp"), values=("1", "2")),
    component_switch("compile", "compile", "ops", "torch_compile", "auto"),
    component_switch("graphs", "graphs", "graphs", "cuda_graph", "eager"),
    component_switch("radix", "radix", "cache", "radix", "none"),
    Technique(
        "attention",
        "attention",
        (),
        "auto or the name of a backend",
        _apply_attention,
        lambda plan: plan.choice("attention").name,
    ),
    Technique(
        "nextn",
        "NextN",
        ("0", "1", "3"),
        "on, off, a number of steps, STEPS/TOPK/TOKENS",
        _apply_nextn,
        _sizes_of("nextn"),
    ),
    Technique(
        "drafts",
        "drafts",
        (),
        "ALGORITHM[:SIZE][@FOLDER], such as none, ngram, nextn:3, eagle:3/4/8@FOLDER",
        _apply_drafts,
        _drafts_cell,
    ),
    _parallel("ep_moe", "EP", "ep"),
    _parallel("dp_attention", "DP attention", "dp"),
    Technique(
        "overlap",
        "overlap",
        (ON, OFF),
        "on, off",
        _apply_overlap,
        lambda plan: MARK if plan.overlap else "",
    ),
    Technique(
        "chunked",
        "chunk",
        (ON, "512", OFF),
        "on, off (whole prompts), a number of tokens",
        _apply_chunks,
        _chunks_cell,
    ),
    Technique(
        "fp8_cache",
        "FP8 cache",
        (OFF, ON),
        "on (E4M3), off, a dtype",
        _apply_cache_dtype,
        _cache_dtype_cell,
    ),
)


def _field(path: str) -> Technique:
    """Return the technique that sets the configuration field ``path``."""

    def apply(config: Config, value: str) -> None:
        set_path(config, path, literal(value))

    def cell(plan: EnginePlan) -> str:
        given = value_at(plan.config, path)
        return "" if given is None else str(given)

    return Technique(path, path, (), "values of this field", apply, cell)


def technique(name: str) -> Technique:
    """Return the technique ``name``.

    Raises:
        ValueError: there is none.
    """
    if "." in name:
        return _field(name)
    for one in TECHNIQUES:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in TECHNIQUES)
    raise ValueError(f"no technique {name!r}: use {known}, or a field such as scheduler.chunk_size")


def compared_values(name: str, plugins: PluginSet, model: str) -> tuple[str, ...]:
    """Return the values of a technique that are compared unless others are given.

    Args:
        name: name of the technique.
        plugins: the plugins, whose attention backends or drafts are compared.
        model: the model, for the kind of its attention and the drafts that it has.

    Raises:
        ValueError: the technique is unknown, or is a field, which has no such values.
    """
    found = technique(name)
    if "." in name:
        raise ValueError(f"{name} needs values: {name}=VALUE,VALUE")
    if found.values:
        return found.values
    if name == "drafts":
        return _drafts_of(plugins, model)
    kind = plugins.read_model(model).facts.kind
    backends = [one.component for one in plugins.components("attention")]
    return ("auto", *(one.name for one in backends if kind in getattr(one.offers, "kinds", ())))


def with_settings(config: Mapping[str, Any], settings: Mapping[str, str]) -> Config:
    """Return ``config`` with techniques set to values, in the order of ``TECHNIQUES``.

    Raises:
        ValueError: an unknown technique, a value that it cannot have, or both names of drafts.
    """
    if {"nextn", "drafts"} <= settings.keys():
        raise ValueError("nextn and drafts both choose the drafts of a row: give one of them")
    order = {one.name: number for number, one in enumerate(TECHNIQUES)}
    changed = copy.deepcopy(dict(config))
    for name in sorted(settings, key=lambda name: order.get(name, len(order))):
        found = technique(name)
        try:
            found.apply(changed, settings[name])
        except ValueError as error:
            raise ValueError(f"{name}={settings[name]}: {error} ({found.accepts})") from None
    return changed


def columns(names: set[str]) -> list[Technique]:
    """Return the columns of a table: all techniques, then the fields among ``names``."""
    fields = sorted(name for name in names if "." in name)
    return [*TECHNIQUES, *map(_field, fields)]
