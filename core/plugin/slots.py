"""The table of slots: plugin kinds with their hook, config section and default.

To add a slot, add an entry here, a hook in ``hookspecs.py`` and a protocol in ``protocols/``. Plan
zone: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """A place of the engine that plugins fill with a component, or with several.

    Attributes:
        name: name of the slot, as in ``EnginePlan.choice(name)``.
        hook: registration hook that returns the slot's components.
        section: config section; "" for the model slot, which the operator does not configure.
        default: value of ``use`` when none is given; with "auto" the plan chooses.
        offers: name of the offers class in ``offers.py``.
        protocol: name of the runtime protocol in ``protocols/``.
        many: the section is an ordered list, and the slot holds any number of components.
        step: the component takes part in every step, so its modes, overlap and capture levels are
            checked.
    """

    name: str
    hook: str
    section: str
    default: str
    offers: str
    protocol: str
    many: bool = False
    step: bool = False


SLOTS: tuple[Slot, ...] = (
    Slot("model", "register_models", "", "auto", "ModelOffers", "ModelFamily", step=True),
    Slot("weights", "register_weight_sources", "weights", "auto", "WeightOffers", "WeightSource"),
    Slot(
        "attention",
        "register_attention_backends",
        "attention",
        "auto",
        "AttentionOffers",
        "AttentionBackend",
        step=True,
    ),
    Slot(
        "quantization",
        "register_quantization_schemes",
        "quantization",
        "auto",
        "QuantizationOffers",
        "QuantizationScheme",
        step=True,
    ),
    Slot(
        "parallel",
        "register_parallel_strategies",
        "parallel",
        "single",
        "ParallelOffers",
        "ParallelStrategy",
        many=True,
        step=True,
    ),
    Slot(
        "collectives",
        "register_collectives",
        "collectives",
        "auto",
        "CollectiveOffers",
        "Collectives",
        step=True,
    ),
    Slot(
        "speculative",
        "register_speculative_algorithms",
        "speculative",
        "none",
        "SpeculativeOffers",
        "SpeculativeAlgorithm",
        step=True,
    ),
    Slot(
        "scheduler",
        "register_schedulers",
        "scheduler",
        "continuous",
        "SchedulerOffers",
        "Scheduler",
    ),
    Slot(
        "policy",
        "register_scheduling_policies",
        "policy",
        "fcfs",
        "PolicyOffers",
        "SchedulingPolicy",
    ),
    Slot(
        "graphs",
        "register_graph_runners",
        "graphs",
        "auto",
        "GraphOffers",
        "GraphRunner",
        step=True,
    ),
    Slot("cache", "register_prefix_caches", "cache", "radix", "CacheOffers", "PrefixCache"),
    Slot(
        "sampling", "register_samplers", "sampling", "auto", "SamplerOffers", "Sampler", step=True
    ),
    Slot("grammar", "register_grammars", "grammar", "auto", "GrammarOffers", "GrammarBackend"),
    Slot(
        "outputs",
        "register_output_parsers",
        "outputs",
        "auto",
        "OutputOffers",
        "OutputParserFactory",
        many=True,
    ),
    Slot("executor", "register_executors", "executor", "auto", "ExecutorOffers", "Executor"),
    Slot("ops", "register_ops", "ops", "auto", "OpsOffers", "Ops", step=True),
)

BY_NAME = {slot.name: slot for slot in SLOTS}
#: name of an offers class -> name of its slot
SLOT_OF_OFFERS = {slot.offers: slot.name for slot in SLOTS}

#: slots whose components run inside a captured forward pass of the model
CAPTURED_SLOTS = ("model", "quantization", "ops")
