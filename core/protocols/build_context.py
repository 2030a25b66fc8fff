"""The context in which model families build their models and layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.protocols.attention import AttentionBackend
from glowplug.core.protocols.ops import Ops
from glowplug.core.protocols.parallel import Collectives
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.protocols.quantization import (
    ExpertsMethod,
    ExpertsShape,
    LinearMethod,
    LinearShape,
    QuantizationScheme,
)
from glowplug.core.protocols.worker import Worker
from glowplug.core.step.graph_pieces import DraftExtend, SplitPoints

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BuildContext:
    """All objects and settings that layers read, once, while they are built.

    Attributes:
        facts: the checkpoint's facts; ``facts.config`` is its config.json.
        worker: the rank and its device.
        dtype: dtype of activations and of unquantized weights.
        context: longest sequence in tokens, for RoPE tables.
        scheme: the chosen quantization scheme.
        plain: the scheme for modules that ``scheme`` does not cover.
        parallel: the parallelism strategies in order, as one object; it returns a layer's shards.
        collectives: the collectives of the rank.
        attention: the backend that every attention layer calls.
        ops: the table of small kernels.
        split_points: the object through which layers call the parts of a captured pass that cannot
            be captured, above all attention.
        draft_extend: the object through which a speculative algorithm calls its draft's pass over a
            step's tokens.
        first_layer: KV-pool number of this model's first layer; a draft model's layers follow the
            target's.
        online: ``scheme`` quantises weights while loading. The scheme of the output head is then
            ``plain``, whatever name the head has.
        spare: number of positions beyond ``context`` that steps may touch. The results of tokens
            at these positions are dropped.
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
    split_points: SplitPoints = field(default_factory=SplitPoints)
    draft_extend: DraftExtend = field(default_factory=DraftExtend)
    first_layer: int = 0
    spare: int = 0
    online: bool = False

    @property
    def sums_in_norm(self) -> bool:
        """Norms sum over the ranks, so layers before them return ``PartialSum``."""
        return hasattr(self.collectives, "reduced_norm")

    def scheme_for(self, module: str, rows: int, columns: int) -> QuantizationScheme:
        """Return the quantization scheme of a module with a weight [rows, columns]."""
        return self.scheme if self.scheme.covers(module, rows, columns) else self.plain

    def linear(self, scheme: QuantizationScheme, shape: LinearShape) -> LinearMethod:
        """Return the method of a linear layer; that of ``plain`` if ``scheme`` hands it back."""
        method = scheme.linear(shape) or self.plain.linear(shape)
        assert method is not None, "the unquantized scheme hands nothing back"
        return method

    def experts(self, scheme: QuantizationScheme, shape: ExpertsShape) -> ExpertsMethod:
        """Return the method of routed experts; that of ``plain`` if ``scheme`` hands them back."""
        method = scheme.experts(shape) or self.plain.experts(shape)
        assert method is not None, "the unquantized scheme hands nothing back"
        return method
