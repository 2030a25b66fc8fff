"""Protocols: the methods that the runtime object of each slot must have.

A plugin's ``factory(options, plan, worker)`` returns such an object. Import from this package; its
submodules are private. Importing it imports torch only for type checking.

Methods of these names mean the same in every slot:

- ``reserve(limits)``: allocate every persistent buffer. It may be called a second time with other
  ``num_pages`` and ``kv``, which replace the first; a device's memory is measured between the two
  calls.
- ``plan_step(batch)``: do a step's host work and its copies to the device. It is never captured in
  a graph.
- Methods that work on the device only may be captured in a graph.

Names in shapes: B rows of a step, T tokens, D decoding rows, W width (tokens of a decoding row in a
step: 1 + drafts), N rows or tokens of an argument, H attention heads, K experts or entries chosen
for a token, V vocabulary.
"""

from __future__ import annotations

from glowplug.core.protocols.attention import (
    AttentionBackend as AttentionBackend,
    MhaLayer as MhaLayer,
    MlaLayer as MlaLayer,
    PreparedMla as PreparedMla,
    ProjectedMla as ProjectedMla,
    RopeRows as RopeRows,
)
from glowplug.core.protocols.build_context import BuildContext as BuildContext
from glowplug.core.protocols.front import (
    Executor as Executor,
    OutputParser as OutputParser,
    OutputParserFactory as OutputParserFactory,
    OutputRequest as OutputRequest,
    Piece as Piece,
    ReasoningParserFactory as ReasoningParserFactory,
    ReasoningTags as ReasoningTags,
    ToolParserFactory as ToolParserFactory,
)
from glowplug.core.protocols.grammar import (
    CompiledGrammar as CompiledGrammar,
    GrammarBackend as GrammarBackend,
    Masks as Masks,
    Matcher as Matcher,
    words_of as words_of,
)
from glowplug.core.protocols.graphs import (
    GraphRunner as GraphRunner,
    Steps as Steps,
)
from glowplug.core.protocols.models import (
    KeepsFeatures as KeepsFeatures,
    Model as Model,
    ModelFamily as ModelFamily,
    SampledLastLayer as SampledLastLayer,
    SlicedVocabulary as SlicedVocabulary,
    VocabularySlices as VocabularySlices,
)
from glowplug.core.protocols.ops import (
    Ops as Ops,
    Route as Route,
    RouteSettingReady as RouteSettingReady,
)
from glowplug.core.protocols.parallel import (
    Collectives as Collectives,
    ExpertExchange as ExpertExchange,
    ExpertRows as ExpertRows,
    ParallelStrategy as ParallelStrategy,
    RequestRouter as RequestRouter,
    Shard as Shard,
)
from glowplug.core.protocols.quantization import (
    ExpertsMethod as ExpertsMethod,
    ExpertsShape as ExpertsShape,
    LinearMethod as LinearMethod,
    LinearShape as LinearShape,
    PartialSum as PartialSum,
    Parts as Parts,
    QuantizationScheme as QuantizationScheme,
    Quantized as Quantized,
    StartedExperts as StartedExperts,
)
from glowplug.core.protocols.sampling import (
    PageStates as PageStates,
    Sampled as Sampled,
    Sampler as Sampler,
    SpeculativeAlgorithm as SpeculativeAlgorithm,
)
from glowplug.core.protocols.scheduling import (
    MOST_OVERTAKEN as MOST_OVERTAKEN,
    AdaptiveScheduler as AdaptiveScheduler,
    DraftPolicy as DraftPolicy,
    PageTier as PageTier,
    PrefixCache as PrefixCache,
    PrefixMatch as PrefixMatch,
    Scheduler as Scheduler,
    SchedulingPolicy as SchedulingPolicy,
    TieredCache as TieredCache,
)
from glowplug.core.protocols.serving import (
    EndedRequest as EndedRequest,
    EngineHandle as EngineHandle,
    OutputPart as OutputPart,
    RequestObserver as RequestObserver,
)
from glowplug.core.protocols.weights import (
    StreamingSource as StreamingSource,
    WeightSource as WeightSource,
    WeightTarget as WeightTarget,
)
from glowplug.core.protocols.worker import (
    Limits as Limits,
    Worker as Worker,
)
