"""The operator's configuration: a pydantic model built from the registered components.

Each slot has one section, a discriminated union on ``use``; ``use = "auto"`` accepts only the
fields that all components of the slot have. The configuration is parsed once, strictly (a number in
quotes is not a number), and is then frozen. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast

import msgspec
from pydantic import Field, ValidationError, create_model

from glowplug.core.config.errors import Explained, explain, unwritable, without_use
from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Options
from glowplug.core.plugin.options import (
    OPTION_BASES,
    AttentionOptions,
    CacheOptions,
    CollectivesOptions,
    ExecutorOptions,
    GraphOptions,
    LogOptions,
    MemoryOptions,
    MetricsOptions,
    OpsOptions,
    OutputOptions,
    ParallelOptions,
    PolicyOptions,
    QuantizationOptions,
    SamplingOptions,
    SchedulerOptions,
    Section,
    ServerOptions,
    SpeculativeOptions,
    WeightOptions,
)
from glowplug.core.plugin.slots import SLOTS, Slot

if TYPE_CHECKING:
    from glowplug.core.plugin.registry import PluginSet

SECRETS = frozenset({"server.api_key", "server.admin_api_key"})  #: paths whose values show as ***


class EngineConfig(Section):
    """Fields of the configuration's top level.

    :func:`config_class` adds one section per slot, with the options of the registered components.
    """

    model: str = Field(
        min_length=1, description='model folder, file, downloaded hub id, or "embedded"'
    )
    tokenizer: str | None = Field(
        None,
        description='folder of the tokenizer, downloaded hub id, or "embedded"; None: the model\'s',
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Jinja file, or the template itself if it contains a brace; "
        "None: the tokenizer's",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute dtype"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    seed: int = Field(
        0,
        ge=0,
        lt=1 << 63,
        description="seed of random weights and of requests that give none",
    )
    context_length: int | None = Field(
        None, ge=1, description="longest sequence in tokens; None: the model's if it fits"
    )
    skip_tokenizer: bool = Field(False, description="accept and return token ids only")
    revision: str | None = Field(None, description="accepted without effect; nothing is downloaded")
    trust_remote_code: bool = Field(
        False, description="accepted without effect; code from a model folder is never run"
    )
    memory: MemoryOptions = MemoryOptions.model_validate({})
    server: ServerOptions = ServerOptions.model_validate({})
    log: LogOptions = LogOptions.model_validate({})
    metrics: MetricsOptions = MetricsOptions.model_validate({})

    if TYPE_CHECKING:  # the sections that config_class() adds, with the slots' base classes
        attention: AttentionOptions
        quantization: QuantizationOptions
        parallel: tuple[ParallelOptions, ...]
        collectives: CollectivesOptions
        speculative: SpeculativeOptions
        scheduler: SchedulerOptions
        policy: PolicyOptions
        graphs: GraphOptions
        cache: CacheOptions
        sampling: SamplingOptions
        outputs: tuple[OutputOptions, ...]
        weights: WeightOptions
        executor: ExecutorOptions
        ops: OpsOptions

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        """Return the top-level fields that change nothing in this plan, each with its reason."""
        found = {
            "revision": "the model is read where it is, nothing is downloaded",
            "trust_remote_code": "code from a model folder is never run",
        }
        if self.skip_tokenizer:
            found |= dict.fromkeys(
                ("tokenizer", "chat_template"), "this engine runs without a tokenizer"
            )
        return found

    def section(self, slot: Slot) -> tuple[Options, ...]:
        """Return the options given for a slot; () for a slot without a section."""
        if not slot.section:
            return ()
        value: Any = getattr(self, slot.section)
        return tuple(value) if slot.many else (value,)


@lru_cache(maxsize=8)
def config_class(plugins: PluginSet) -> type[EngineConfig]:
    """Return the configuration model of these plugins, cached because it is slow to build."""
    fields: dict[str, Any] = {}
    for slot in SLOTS:
        if slot.section:
            members = [found.component.options for found in plugins.components(slot.name)]
            fields[slot.section] = _many(members) if slot.many else _one(slot, members)
    made: type[EngineConfig] = create_model("EngineConfig", __base__=EngineConfig, **fields)
    return made


def _one(slot: Slot, members: list[type[Options]]) -> tuple[Any, Any]:
    """Return (annotation, field) of the section of a slot that holds one component."""
    auto = auto_options(slot)
    if not members:
        return (auto, Field(default_factory=auto))
    union: Any = Union[(auto, *members)]
    return (Annotated[union, Field(discriminator="use")], Field(default_factory=auto))


def _many(members: list[type[Options]]) -> tuple[Any, Any]:
    """Return (annotation, default) of the section of a slot that holds a list of components."""
    if len(members) == 1:
        return (tuple[members[0], ...], ())  # type: ignore[valid-type]
    if not members:
        return (tuple[Options, ...], ())
    # the union is built at run time
    union: Any = Annotated[Union[tuple(members)], Field(discriminator="use")]  # noqa: UP007
    return (tuple[union, ...], ())


_AUTO: dict[str, type[Options]] = {}


def auto_options(slot: Slot) -> type[Options]:
    """Return the options class of ``use = "auto"``: the fields common to the slot's components."""
    if slot.name not in _AUTO:
        base = OPTION_BASES.get(slot.name, Options)
        use: Any = (Literal["auto"], "auto")
        made: Any = create_model(f"Auto{slot.name.capitalize()}Options", __base__=base, use=use)
        _AUTO[slot.name] = cast(type[Options], made)
    return _AUTO[slot.name]


@dataclass
class Parsed:
    """A parsed configuration.

    Attributes:
        config: the frozen model, without the keys that were refused.
        raw: the operator's dict, as given.
        origins: origin of each value by dotted path: "engine.toml:12", "--tp 8" or a plugin's name.
        operator: the operator's values by dotted path, sections included.
        refusals: refusals of keys and values.
        unknown: slot -> a ``use`` that is not the name of a registered component; the section is
            then checked as if ``use`` were "auto".
    """

    config: EngineConfig
    raw: Mapping[str, Any]
    origins: Mapping[str, str]
    operator: Mapping[str, Any]
    refusals: list[Refusal] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)


def parse(
    raw: Mapping[str, Any],
    plugins: PluginSet,
    model: type[EngineConfig],
    contributed: Mapping[str, tuple[Any, str]],
    origins: Mapping[str, str],
) -> Parsed:
    """Parse a configuration (pass one); mistakes are collected in ``refusals`` and never raised.

    Args:
        raw: the operator's configuration, a nested dict.
        model: the configuration model of ``plugins`` (``config_class``).
        contributed: (value, contributor) of contributed defaults by dotted path.
        origins: origin of the operator's values by dotted path.
    """
    operator = by_path(raw)
    merged, sources = contribute(raw, contributed, operator)
    data = _with_use(merged, plugins)
    origins = {**sources, **origins}
    refusals = [*_unwritable(data, origins), *_items_without_use(data, plugins, origins)]
    unknown: dict[str, str] = {}
    # NOTE: each round removes at least one key; the bound stops a validator that refuses forever
    for _ in range(64):
        try:
            config = model.__pydantic_validator__.validate_json(
                msgspec.json.encode(data), strict=True
            )
            return Parsed(cast(EngineConfig, config), raw, origins, operator, refusals, unknown)
        except ValidationError as error:
            found = [
                explain(problem, data, plugins, model, origins)
                for problem in error.errors(include_url=False)
            ]
            for one in _outermost(found):
                emptied = any(
                    before.field.startswith(f"{one.refusal.field}.") for before in refusals
                )
                # a list is not refused for the lack of items that were themselves refused
                if one.refusal not in refusals and not emptied:
                    refusals.append(one.refusal)
                if one.slot:
                    unknown[one.slot] = one.name
                _drop(data, one.path)
            _compact(data)
    raise AssertionError(f"the configuration does not settle: {refusals}")


def by_path(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return every value of a nested dict by dotted path, sections included.

    Items of a list of sections have their number as key.
    """
    found: dict[str, Any] = {}
    _flatten(value, "", found)
    return found


def _flatten(value: Any, prefix: str, found: dict[str, Any]) -> None:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        path = f"{prefix}{key}"
        found[path] = item
        if (
            isinstance(item, dict)
            or isinstance(item, list | tuple)
            and any(isinstance(one, dict) for one in item)
        ):
            _flatten(item, f"{path}.", found)


def contribute(
    raw: Mapping[str, Any], contributed: Mapping[str, tuple[Any, str]], operator: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge contributed defaults under the operator's values.

    A contributed option of a section is dropped if the operator chose another ``use`` there.

    Returns:
        The merged configuration, and the contributor of each contributed value by dotted path.
    """
    data: dict[str, Any] = {key: _copy(value) for key, value in raw.items()}
    sources: dict[str, str] = {}
    for path, (value, by) in contributed.items():
        section, _, key = path.partition(".")
        if path in operator or (key and not isinstance(data.get(section, {}), dict)):
            continue
        picked = raw[section].get("use") if key and isinstance(raw.get(section), Mapping) else None
        if picked is not None and picked != contributed.get(f"{section}.use", (picked, ""))[0]:
            continue
        if key:
            data.setdefault(section, {})[key] = value
        else:
            data[section] = _copy(value)
        sources[path] = by
    return data, sources


def _copy(value: Any) -> Any:
    """Return a deep copy in plain dicts and lists, with paths as text."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _with_use(data: dict[str, Any], plugins: PluginSet) -> dict[str, Any]:
    """Fill in the default ``use`` of sections and replace aliases by registered names, in place."""
    for slot in SLOTS:
        if not slot.section:
            continue
        if slot.many:
            value = data.get(slot.section)
            if isinstance(value, dict):
                data[slot.section] = value = [value]
            for item in value if isinstance(value, list) else ():
                if isinstance(item, dict) and isinstance(item.get("use"), str):
                    item["use"] = canonical(slot, item["use"], plugins)
            continue
        value = data.setdefault(slot.section, {})
        if isinstance(value, dict):
            if "use" not in value:
                data[slot.section] = {"use": slot.default, **value}
            elif isinstance(value["use"], str):
                value["use"] = canonical(slot, value["use"], plugins)
    return data


def _unwritable(data: dict[str, Any], origins: Mapping[str, str]) -> list[Refusal]:
    """Remove values that a configuration file cannot hold, and return their refusals.

    Examples are half a surrogate pair, a number beyond 64 bits, or an object.
    """
    try:
        msgspec.json.encode(data)
        return []
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError):
        return _refuse_unwritable(data, (), data, origins)


def _refuse_unwritable(
    value: Any, path: tuple[str | int, ...], data: dict[str, Any], origins: Mapping[str, str]
) -> list[Refusal]:
    """Remove unwritable values at or below ``path`` from ``data``, and return their refusals."""
    if isinstance(value, dict) and all(isinstance(key, str) and key.isprintable() for key in value):
        return [
            r
            for key, item in list(value.items())
            for r in _refuse_unwritable(item, (*path, key), data, origins)
        ]
    if isinstance(value, list):
        return [
            r
            for i, item in enumerate(value)
            for r in _refuse_unwritable(item, (*path, i), data, origins)
        ]
    try:
        msgspec.json.encode(value)
        return []
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError):
        _drop(data, path)
        return [unwritable(path, value, origins)]


def _items_without_use(
    data: dict[str, Any], plugins: PluginSet, origins: Mapping[str, str]
) -> list[Refusal]:
    """Remove list items without ``use``, and return their refusals."""
    refusals = []
    for slot in SLOTS:
        found = data.get(slot.section) if slot.many else None
        items: list[Any] = found if isinstance(found, list) else []
        for number, item in enumerate(items):
            if isinstance(item, dict) and "use" not in item:
                refusals.append(without_use(slot, (slot.section, number), plugins, origins))
                items[number] = None
    _compact(data)
    return refusals


def canonical(slot: Slot, name: str, plugins: PluginSet) -> str:
    """Return the registered name for ``name``: itself, or the component that has it as an alias."""
    found = plugins.components(slot.name)
    if any(registration.component.name == name for registration in found):
        return name
    for registration in found:
        aliases: frozenset[str] = getattr(registration.component.offers, "aliases", frozenset())
        if name in aliases or name.replace("-", "_") == registration.component.name:
            return registration.component.name
    return name


def _outermost(found: list[Explained]) -> list[Explained]:
    """Return the problems without those inside a section that is refused as a whole."""
    gone = {one.path for one in found if one.slot}
    return [
        one for one in found if one.slot or not any(one.path[: len(path)] == path for path in gone)
    ]


_SINGLE = frozenset(slot.section for slot in SLOTS if slot.section and not slot.many)
_LISTS = frozenset(slot.section for slot in SLOTS if slot.many)


def _drop(data: dict[str, Any], path: Sequence[str | int]) -> None:
    """Remove one refused key, so that the rest can still be checked.

    An item of a list of sections becomes None; a list of plain values is removed as a whole.
    """
    if not path or path[0] == "model":
        data["model"] = "?"
        return
    holder: Any = data
    for depth, part in enumerate(path[:-1]):
        if isinstance(holder, dict) and part not in holder:
            return  # already removed as a whole, because of another of its items
        if isinstance(holder[part], list) and (depth or part not in _LISTS):
            holder.pop(part)
            return
        holder = holder[part]
    if isinstance(holder, list):
        holder[int(path[-1])] = None
    elif len(path) == 1 and path[0] in _SINGLE:
        holder[path[0]] = _as_auto(str(path[0]), holder[path[0]])
    else:
        holder.pop(path[-1], None)


def _as_auto(section: str, value: Any) -> dict[str, Any]:
    """Return a section of unknown ``use`` as ``auto``, with the common options only."""
    common = auto_options(next(slot for slot in SLOTS if slot.section == section)).model_fields
    kept = value if isinstance(value, dict) else {}
    return {**{key: item for key, item in kept.items() if key in common}, "use": "auto"}


def _compact(data: dict[str, Any]) -> None:
    """Remove None from the lists of ``data``."""
    for key, value in data.items():
        if isinstance(value, list):
            data[key] = [item for item in value if item is not None]


def recorded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the operator's configuration for the plan, in plain dicts and lists."""
    copy: dict[str, Any] = _copy(raw)
    return copy


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration for display, with API keys replaced by ***."""
    copy = recorded(config)
    for path in SECRETS:
        section, _, key = path.partition(".")
        held = copy.get(section)
        if isinstance(held, dict) and held.get(key) is not None:
            held[key] = "***"
    return copy
