"""The operator's configuration: a pydantic model built from the registered components.

Each slot has one section, a discriminated union on ``use``; ``use = "auto"`` accepts only the
fields that all components of the slot have. The configuration is parsed once, strictly (a number in
quotes is not a number), and is then frozen. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from functools import lru_cache
from pathlib import PurePath
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast

from pydantic import Field, create_model

from glowplug.core.config.operation_options import LogOptions, MetricsOptions, TracingOptions
from glowplug.core.facts.hub_cache import is_hub_id
from glowplug.core.plugin.component import CheckContext, Options
from glowplug.core.plugin.options import (
    OPTION_BASES,
    AttentionOptions,
    CacheOptions,
    CollectivesOptions,
    ExecutorOptions,
    GraphOptions,
    MemoryOptions,
    OpsOptions,
    OutputOptions,
    ParallelOptions,
    PolicyOptions,
    QuantizationOptions,
    SamplingOptions,
    SchedulerOptions,
    Section,
    ServerOptions,
    WeightOptions,
)
from glowplug.core.plugin.slots import SLOTS, Slot
from glowplug.core.plugin.speculative_options import SpeculativeOptions

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
    benchmark: bool = Field(
        False,
        description="the engine only serves measurements, so its answers may be meaningless; set "
        "by glowplug bench",
    )
    skip_tokenizer: bool = Field(False, description="accept and return token ids only")
    revision: str | None = Field(
        None,
        min_length=1,
        description="branch, tag or commit of a downloaded hub id; None: its default branch",
    )
    trust_remote_code: bool = Field(
        False, description="accepted without effect; code from a model folder is never run"
    )
    memory: MemoryOptions = MemoryOptions.model_validate({})
    server: ServerOptions = ServerOptions.model_validate({})
    log: LogOptions = LogOptions.model_validate({})
    metrics: MetricsOptions = MetricsOptions.model_validate({})
    tracing: TracingOptions = TracingOptions.model_validate({})

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
            "trust_remote_code": "code from a model folder is never run",
        }
        if not is_hub_id(self.model):
            found["revision"] = "the model is not the id of a downloaded model"
        if self.speculative.simulate_accept_rates is None:
            found["benchmark"] = "no acceptance is simulated"
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


def config_class(plugins: PluginSet) -> type[EngineConfig]:
    """Return the configuration model of these plugins."""
    return _config_class(
        tuple(
            (slot, tuple(found.component.options for found in plugins.components(slot.name)))
            for slot in SLOTS
            if slot.section
        )
    )


@lru_cache(maxsize=8)
def _config_class(
    sections: tuple[tuple[Slot, tuple[type[Options], ...]], ...],
) -> type[EngineConfig]:
    """Return the configuration model of these sections.

    The model is kept because it takes 20 ms to build, half the time of a plan.

    Args:
        sections: each slot that has a section, with the options of its components.
    """
    fields: dict[str, Any] = {
        slot.section: _many(members) if slot.many else _one(slot, members)
        for slot, members in sections
    }
    made: type[EngineConfig] = create_model("EngineConfig", __base__=EngineConfig, **fields)
    return made


def _one(slot: Slot, members: Seq[type[Options]]) -> tuple[Any, Any]:
    """Return (annotation, field) of the model field for a slot that holds one component."""
    auto = auto_options(slot)
    if not members:
        return (auto, Field(default_factory=auto))
    union: Any = Union[(auto, *members)]
    return (Annotated[union, Field(discriminator="use")], Field(default_factory=auto))


def _many(members: Seq[type[Options]]) -> tuple[Any, Any]:
    """Return (annotation, default) of the model field for a slot that holds several components."""
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


def canonical(slot: Slot, name: str, plugins: PluginSet) -> str:
    """Return the registered name of the component with the name or alias ``name``.

    The result is ``name`` itself if there is no such component.
    """
    if plugins.find(slot.name, name) is not None:
        return name
    for registration in plugins.components(slot.name):
        aliases: frozenset[str] = getattr(registration.component.offers, "aliases", frozenset())
        if name in aliases or name.replace("-", "_") == registration.component.name:
            return registration.component.name
    return name


def plain_copy(value: Any) -> Any:
    """Copy ``value`` deeply to plain dicts and lists, with paths as text."""
    if isinstance(value, (str, int, float, NoneType)):
        return value  # NOTE: most values, and the test for a Mapping takes five times as long
    if isinstance(value, Mapping):
        return {key: plain_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_copy(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def recorded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the operator's configuration for the plan, in plain dicts and lists."""
    copy: dict[str, Any] = plain_copy(raw)
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
