"""Construction of a rank's worker, plugins and runtime objects from a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from glowplug.core.errors import GlowplugError, PluginLoadError
from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.facts.mesh import coordinates
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.budget.units import human
from glowplug.core.plan.plan import Choice, EnginePlan
from glowplug.core.plugin.loading import (
    BUILT_IN,
    PluginSource,
    Registration,
    component_failure,
    describe,
    import_factory,
)
from glowplug.core.plugin.offers import (
    CollectiveOffers,
    ParallelOffers,
    QuantizationOffers,
    SpeculativeOffers,
)
from glowplug.core.plugin.registry import (
    PluginSet,
    built_in_plugins,
    distribution_of,
    entry_point_sources,
)
from glowplug.core.protocols import (
    AttentionBackend,
    Collectives,
    QuantizationScheme,
    SpeculativeAlgorithm,
    Worker,
)
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.startup.checks.members import member_faults
from glowplug.core.step.graph_pieces import DraftExtend


def build_component(plugins: PluginSet, choice: Choice, plan: EnginePlan, worker: Any) -> Any:
    """Return the runtime object of a choice: ``factory(options, plan, worker)``.

    The options are parsed again, the factory is imported, and the object is checked for the
    members of the slot's protocol.

    Raises:
        PluginLoadError: the component is not loaded here, its factory cannot be imported or raises
            an exception, or its object lacks a member; the message names component, distribution,
            version and phase.
    """
    found = plugins.find(choice.slot, choice.name)
    if found is None:
        raise PluginLoadError(
            f"the plan chose {choice.slot} {choice.name!r} of {choice.distribution}, "
            "which is not loaded here"
        )
    options = found.component.options.model_validate(choice.options)

    try:
        factory = import_factory(found.component, f"{found.distribution} {found.version}".rstrip())
        made = factory(options, plan, worker)
    except PluginLoadError as error:
        raise _failure(choice, found, str(error)) from error
    # the machine or a connection is at fault, not the component
    except (GlowplugError, MemoryError, EOFError, OSError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise _failure(choice, found, describe(error)) from error
    faults = member_faults(choice.slot, made, found.component.offers)
    if choice.slot == "speculative" and not faults:
        faults = _width_faults(made, plan)
    if faults:
        raise _failure(choice, found, "; ".join(faults))
    return made


def _failure(choice: Choice, found: Registration, reason: str) -> PluginLoadError:
    """Return the error for a component that cannot be built."""
    return PluginLoadError(
        component_failure(
            choice.slot, choice.name, found.distribution, found.version, "build", reason
        )
    )


def _width_faults(made: SpeculativeAlgorithm, plan: EnginePlan) -> list[str]:
    """Return how the algorithm's width contradicts the plan; [] if it does not."""
    if made.width() == plan.sizes.width:
        return []
    return [
        f"width() returns {made.width()}, but by its options' draft_shape() a decoding row "
        f"computes {plan.sizes.width} tokens in a step, for which the plan has memory"
    ]


def load_plugins_for(plan: EnginePlan) -> PluginSet:
    """Return the plugin set that a plan was made with.

    Raises:
        PluginLoadError: this environment holds another set of plugins, or other versions.
    """
    found = {source.name: source for source in entry_point_sources()}
    defaults = set(built_in_plugins())
    sources = []
    for name in plan.plugins:
        if name in defaults:
            sources.append(PluginSource(name, name))
        else:
            sources.append(found.get(name) or PluginSource(name, name, *distribution_of(name)))
    plugins = PluginSet(sources)
    if plugins.fingerprint != plan.plugin_fingerprint:
        others = (
            ", ".join(source.label for source in plugins.sources if source.distribution != BUILT_IN)
            or "none"
        )
        raise PluginLoadError(
            "this process loaded other plugins or versions than the plan was made with "
            f"(fingerprint {plugins.fingerprint}, plan {plan.plugin_fingerprint}); "
            f"third-party plugins here: {others}"
        )
    return plugins


def plain_scheme(plan: EnginePlan, plugins: PluginSet, worker: Worker) -> QuantizationScheme:
    """Return the scheme for modules that a checkpoint leaves unquantized.

    This is the first registered scheme that reads plain weights and does not quantize them at load.

    Raises:
        GlowplugError: no registered scheme reads unquantized weights.
    """
    for component, _, _ in plugins.components("quantization"):
        offers = component.offers
        if isinstance(offers, QuantizationOffers) and "none" in offers.reads and not offers.online:
            choice = Choice(
                "quantization", component.name, component.factory, {"use": component.name}
            )
            scheme: QuantizationScheme = build_component(plugins, choice, plan, worker)
            return scheme
    raise GlowplugError("no registered quantization scheme reads unquantized weights")


def quantizes_online(plan: EnginePlan, plugins: PluginSet, facts: ModelFacts | None) -> bool:
    """Return whether the plan's scheme quantizes a model's weights while loading.

    ``facts``: facts of the model; None for those of the plan's model.
    """
    offers = plugins.offers("quantization", plan.choice("quantization").name)
    unquantized = (facts or plan.facts.model).quant_method == "none"
    return isinstance(offers, QuantizationOffers) and offers.online and unquantized


def build_attention(plugins: PluginSet, plan: EnginePlan, worker: Worker) -> AttentionBackend:
    """Return the attention backend of ``plan``.

    Raises:
        PluginLoadError: as for ``build_component``; also if the KV layout contradicts the plan.
    """
    attention: AttentionBackend = build_component(plugins, plan.choice("attention"), plan, worker)
    check_kv_layout(plan, attention.kv_layout())
    return attention


def check_kv_layout(plan: EnginePlan, layout: KVLayout) -> None:
    """Compare the KV layout of the attention backend with the one that the plan was sized for.

    Raises:
        PluginLoadError: they differ; the message names the entries and bytes of both.
    """
    planned = plan.kv_layout(lambda context: plan.kv_entries)
    if not plan.kv_entries or layout == planned:
        return
    tokens = plan.sizes.num_pages * plan.sizes.page_size
    raise PluginLoadError(
        f"{plan.title('attention')} failed in phase build: kv_layout() contradicts the plan. It "
        f"returns {layout} ({human(tokens * layout.token_bytes)} in all); the plan has {planned} "
        f"({human(tokens * planned.token_bytes)} in all)\n    fix: return "
        "plan.kv_layout(entries) with the function declared as AttentionOffers.kv_entries"
    )


def draft_extend_of(plan: EnginePlan) -> DraftExtend:
    """Return the rank's object for the draft's pass over a step's tokens."""
    captured = all(choice.options.get("draft_extend", True) for choice in plan.choices_in("graphs"))
    return DraftExtend(apart=not captured)


def foresees(plan: EnginePlan, plugins: PluginSet) -> bool:
    """Return whether the plan's speculative algorithm offers ``foresees``."""
    offers = plugins.offers("speculative", plan.choice("speculative").name)
    return isinstance(offers, SpeculativeOffers) and offers.foresees


def build_context(
    plan: EnginePlan,
    plugins: PluginSet,
    worker: Worker,
    *,
    facts: ModelFacts | None = None,
    context: int | None = None,
    collectives: Collectives | None = None,
) -> BuildContext:
    """Return the context that the plan's model is built from, with newly built components.

    Args:
        facts: model facts to use instead of the plan's.
        context: longest sequence, in tokens, to use instead of the plan's.
        collectives: collectives to use instead of the plan's.
    """
    if collectives is None:
        collectives = build_component(plugins, plan.choice("collectives"), plan, worker)
    components = {
        slot: build_component(plugins, plan.choice(slot), plan, worker)
        for slot in ("quantization", "ops")
    }
    joined = replace(worker, collectives=collectives)
    strategies = [
        build_component(plugins, choice, plan, joined) for choice in plan.choices_in("parallel")
    ]
    return BuildContext(
        facts=facts or plan.facts.model,
        worker=worker,
        dtype=worker.dtype,
        context=context or plan.sizes.context_length,
        scheme=components["quantization"],
        plain=plain_scheme(plan, plugins, worker),
        parallel=ParallelStack(strategies),
        collectives=collectives,
        attention=build_attention(plugins, plan, worker),
        ops=components["ops"],
        draft_extend=draft_extend_of(plan),
        spare=plan.sizes.positions - plan.sizes.context_length,
        online=quantizes_online(plan, plugins, facts),
    )


def make_worker(plan: EnginePlan, rank: int, rendezvous: str = "") -> Worker:
    """Return the ``Worker`` of ``rank``, with its device, dtype and mesh coordinates.

    Each host holds the same number of neighbouring ranks.
    """
    import torch  # the API's process checks grammars with this module, and has no torch

    local = rank % (plan.ranks // plan.hosts)
    device = plan.device if plan.device == "cpu" else f"{plan.device}:{local}"
    return Worker(
        rank=rank,
        ranks=plan.ranks,
        device=device,
        dtype=getattr(torch, plan.dtype),
        coordinates=coordinates(rank, plan.mesh),
        rendezvous=rendezvous,
    )


def write_exchange_table(plugins: PluginSet, record: Mapping[str, Any]) -> Path | None:
    """Write the table of measured exchanges by which collectives choose, and return its path.

    Args:
        plugins: the loaded plugins.
        record: a record of ``bench kernels --collectives``, which names the collectives.

    Returns:
        None if these collectives have no table, or the record has no time for one.
    """
    offers = plugins.offers("collectives", record["chosen"])
    if not isinstance(offers, CollectiveOffers) or not offers.table_writer:
        return None
    path: Path | None = resolve_name(offers.table_writer)(record)
    return path


def write_layout_table(plugins: PluginSet, plan: EnginePlan, record: Mapping[str, Any]) -> Path:
    """Write the table of measured layouts that decides a strategy's size, and return its path.

    Args:
        plugins: the loaded plugins.
        plan: the plan of one of the layouts.
        record: a record of ``tune parallel``, which names a strategy that offers ``auto_size``.
    """
    offers = plugins.offers("parallel", record["strategy"])
    assert isinstance(offers, ParallelOffers) and offers.auto_size is not None
    path: Path = resolve_name(offers.auto_size.table_writer)(plan, record)
    return path
