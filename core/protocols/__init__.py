"""What each slot's runtime object must do. A handful of methods each; made by ``factory(options,
plan, worker)``.

``reserve`` (allocate every persistent buffer; a device's memory is measured between two calls, and
the second, of other ``num_pages`` and ``kv``, replaces the first), ``plan_step`` (host work and
copies, never captured) and the device-only methods mean the same in every slot. Shapes: B rows, T
tokens, D decoding rows, W width, H heads, V vocabulary. Plugins import every name from here; its
home in this package is nobody's business. Importing it imports torch only for type checking.
"""

from __future__ import annotations

from glowplug.core.protocols.attention import (
    AttentionBackend as AttentionBackend,
    MhaLayer as MhaLayer,
    MlaLayer as MlaLayer,
    ProjectedMla as ProjectedMla,
    RopeRows as RopeRows,
)
from glowplug.core.protocols.front import (
    Executor as Executor,
    OutputParser as OutputParser,
    OutputParserFactory as OutputParserFactory,
    Piece as Piece,
)
from glowplug.core.protocols.graphs import (
    GraphRunner as GraphRunner,
    Steps as Steps,
)
from glowplug.core.protocols.models import (
    Model as Model,
    ModelFamily as ModelFamily,
    SampledLastLayer as SampledLastLayer,
)
from glowplug.core.protocols.ops import (
    Ops as Ops,
    Route as Route,
    SignallingRoute as SignallingRoute,
)
from glowplug.core.protocols.parallel import (
    Collectives as Collectives,
    ExpertExchange as ExpertExchange,
    ParallelStrategy as ParallelStrategy,
    RequestRouter as RequestRouter,
    Shard as Shard,
)
from glowplug.core.protocols.quantization import (
    ExpertsMethod as ExpertsMethod,
    ExpertsShape as ExpertsShape,
    LinearMethod as LinearMethod,
    LinearShape as LinearShape,
    Parts as Parts,
    QuantizationScheme as QuantizationScheme,
    Quantized as Quantized,
    StartedExperts as StartedExperts,
)
from glowplug.core.protocols.sampling import (
    Sampled as Sampled,
    Sampler as Sampler,
    SpeculativeAlgorithm as SpeculativeAlgorithm,
)
from glowplug.core.protocols.scheduling import (
    PrefixCache as PrefixCache,
    PrefixMatch as PrefixMatch,
    Scheduler as Scheduler,
    SchedulingPolicy as SchedulingPolicy,
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
