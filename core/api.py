"""The public interface of core for plugin authors: every name a third-party plugin needs.

``from glowplug.core.api import Component, hookimpl`` works without torch. Runtime classes may also
import from ``core.layers``, ``core.step``, ``core.protocols`` and ``core.speculation``; all other
modules are private.
"""

from __future__ import annotations

from glowplug.core.errors import (
    ConfigError,
    FactsError,
    GlowplugError,
    PlanRefused,
    PluginLoadError,
    Refusal,
    RequestError,
    WeightError,
)
from glowplug.core.facts import decoder_tensors, weight_classes
from glowplug.core.facts.decoder_names import DecoderNames
from glowplug.core.facts.inventory import Inventory, Split, TensorSpec
from glowplug.core.facts.kv_layout import KVContext, KVEntry, KVLayout, head_entries, latent_entries
from glowplug.core.facts.layer_sizes import LayerSizes
from glowplug.core.facts.model_facts import (
    DeviceFacts,
    Facts,
    HardwareFacts,
    ModelFacts,
    SoftwareFacts,
    TensorFact,
)
from glowplug.core.facts.stored_formats import OnlineWeight, StoredLeaf, StoredWeight
from glowplug.core.plan.plan import BudgetLine, Choice, Decision, EnginePlan, Sizes
from glowplug.core.plugin.byte_costs import DecodingRows, token_drafts_bytes
from glowplug.core.plugin.component import (
    CONTRACT,
    OPERATIONAL,
    Check,
    CheckContext,
    Chosen,
    CommandFlag,
    Component,
    Options,
    Package,
    Tuner,
)
from glowplug.core.plugin.decided import Decided
from glowplug.core.plugin.draft_costs import DraftCosts
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.grammar_options import GrammarOptions
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.modes import (
    EVERY_MODE_EAGER,
    EVERY_MODE_GRAPH,
    AutoSize,
    DecidedSize,
)
from glowplug.core.plugin.offers import (
    AttentionOffers,
    CacheOffers,
    Capture,
    CollectiveOffers,
    ExecutorOffers,
    GrammarOffers,
    GraphOffers,
    Mode,
    ModelOffers,
    Offers,
    OpsOffers,
    OutputOffers,
    ParallelOffers,
    PolicyOffers,
    QuantizationOffers,
    SamplerOffers,
    SchedulerOffers,
    SpeculativeOffers,
    Tier,
    WeightOffers,
)
from glowplug.core.plugin.options import (
    AttentionOptions,
    CacheOptions,
    CollectivesOptions,
    ExecutorOptions,
    GraphOptions,
    OpsOptions,
    OutputOptions,
    ParallelOptions,
    PolicyOptions,
    QuantizationOptions,
    SamplingOptions,
    SchedulerOptions,
    WeightOptions,
)
from glowplug.core.plugin.speculative_options import SpeculativeOptions

__all__ = [
    "AttentionOffers",
    "AttentionOptions",
    "AutoSize",
    "BudgetLine",
    "CONTRACT",
    "Decided",
    "DecidedSize",
    "OPERATIONAL",
    "CacheOffers",
    "CacheOptions",
    "Capture",
    "Check",
    "CheckContext",
    "Choice",
    "Chosen",
    "CollectiveOffers",
    "CollectivesOptions",
    "CommandFlag",
    "Component",
    "ConfigError",
    "Decision",
    "DecoderNames",
    "DecodingRows",
    "DeviceFacts",
    "DraftCosts",
    "DraftShape",
    "EVERY_MODE_EAGER",
    "EVERY_MODE_GRAPH",
    "EnginePlan",
    "ExecutorOffers",
    "ExecutorOptions",
    "Facts",
    "FactsError",
    "GlowplugError",
    "GrammarOffers",
    "GrammarOptions",
    "GraphOffers",
    "GraphOptions",
    "HardwareFacts",
    "Inventory",
    "KVContext",
    "KVEntry",
    "KVLayout",
    "LayerSizes",
    "Mode",
    "ModelFacts",
    "ModelOffers",
    "Offers",
    "OnlineWeight",
    "OpsOffers",
    "OpsOptions",
    "Options",
    "OutputOffers",
    "OutputOptions",
    "Package",
    "ParallelOffers",
    "ParallelOptions",
    "PlanRefused",
    "PluginLoadError",
    "PolicyOffers",
    "PolicyOptions",
    "QuantizationOffers",
    "QuantizationOptions",
    "Refusal",
    "RequestError",
    "SamplerOffers",
    "SamplingOptions",
    "SchedulerOffers",
    "SchedulerOptions",
    "Sizes",
    "SoftwareFacts",
    "SpeculativeOffers",
    "SpeculativeOptions",
    "Split",
    "StoredLeaf",
    "StoredWeight",
    "TensorFact",
    "TensorSpec",
    "Tier",
    "Tuner",
    "WeightError",
    "WeightOffers",
    "WeightOptions",
    "decoder_tensors",
    "head_entries",
    "hookimpl",
    "latent_entries",
    "token_drafts_bytes",
    "weight_classes",
]
