"""One table: every slot with its hook, config section, cardinality and default. Plan zone: no
torch.

To add a slot: a line here, a hook in ``hookspecs.py``, a protocol in ``protocols/``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Attributes:
    name: key in ``EnginePlan.choices`` and prefix of decision fields.
    hook: registration hook that fills it.
    section: config section ("" for slots the operator does not configure: models).
    many: the section is a list (ordered).
    default: ``use`` when the operator says nothing; "auto" lets the resolver choose.
    offers: name of the offers class in ``offers.py``.
    protocol: name of the runtime protocol in ``protocols/``.
    step: it takes part in every step, so modes, overlap and capture are checked.
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

#: slots whose components are inside a captured pass of the model
CAPTURED_SLOTS = ("model", "quantization", "ops")
