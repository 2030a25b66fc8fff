"""What a model family and its layers receive while they build. Everything a layer binds, it binds
here, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.protocols.attention import AttentionBackend
from glowplug.core.protocols.ops import Ops
from glowplug.core.protocols.parallel import Collectives
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.protocols.quantization import QuantizationScheme
from glowplug.core.protocols.worker import Worker
from glowplug.core.step.graph_pieces import Cuts, Extension

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BuildContext:
    """Attributes:
    facts: the checkpoint's facts; ``facts.config`` is its config.json.
    worker: rank and device.
    dtype: activation and unquantized weight dtype.
    context: longest sequence (rope tables).
    spare: positions behind it that steps may touch with tokens of no consequence.
    scheme: the chosen quantization scheme; ``plain`` is used for modules it does not cover.
    parallel: the strategies in order, as one; layers ask it for their shards.
    attention: the backend every attention layer calls.
    cuts: through which layers call what a captured pass has to leave out, attention above all.
    extension: through which a speculative algorithm calls its draft's pass over a step's tokens.
    first_layer: KV-pool number of this model's first layer (a draft model's layers follow the
    target's).
    """

    facts: ModelFacts
    worker: Worker
    dtype: torch.dtype
    context: int
    scheme: QuantizationScheme
    plain: QuantizationScheme
    parallel: ParallelStack
    collectives: Collectives
    attention: AttentionBackend
    ops: Ops
    cuts: Cuts = field(default_factory=Cuts)
    extension: Extension = field(default_factory=Extension)
    first_layer: int = 0
    spare: int = 0

    def scheme_for(self, module: str) -> QuantizationScheme:
        return self.scheme if self.scheme.covers(module) else self.plain
