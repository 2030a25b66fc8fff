"""The logits of a rank's steps: all of them, or those of the rank's slice of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from glowplug.core.protocols import (
    Model,
    Sampler,
    SlicedVocabulary,
    SpeculativeAlgorithm,
    VocabularySlices,
)


class StepLogits:
    """The logits that steps sample from.

    If ranks divide the vocabulary, a step computes the logits of the rank's slice. They are
    gathered before tokens are accepted, unless the sampler needs no others in this step.

    Args:
        model: the target.
        speculative: the algorithm that accepts tokens.
        sampler: the sampler.
    """

    def __init__(self, model: Model, speculative: SpeculativeAlgorithm, sampler: Sampler) -> None:
        self._model = model
        self._sampler: Any = sampler
        self._head: SlicedVocabulary | None = None
        self._slices: VocabularySlices | None = None
        self._gathers = False
        passes = states(speculative, "passes_rows", "accept")
        takes = states(sampler, "takes_slices", "sample")
        if passes and takes and isinstance(model, SlicedVocabulary):
            self._slices = model.slices
            self._head = None if model.slices is None else model

    def of(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states [N, hidden]: float32 [N, V], or [N, size] of a slice.

        ``hidden``: final hidden states.
        """
        if self._head is not None:
            return self._head.sliced_logits(hidden)
        return self._model.logits(hidden)

    def edit(self, logits: Tensor, change: Callable[[Tensor], None]) -> None:
        """Change the result of ``of`` in place; ``change`` does this to logits [N, V]."""
        if self._slices is None:
            change(logits)
        else:
            self._slices.edit(logits, change)

    def plan_step(self) -> None:
        """Decide whether the step gathers its logits; called after ``Sampler.capture_key``."""
        if self._slices is not None:
            self._gathers = not self._sampler.takes_slices(self._slices)

    def to_accept(self, logits: Tensor) -> Tensor:
        """Return the logits from which the step just planned accepts tokens.

        ``logits``: the step's result of ``of``.
        """
        return self.gather(logits) if self._gathers else logits

    def gather(self, logits: Tensor) -> Tensor:
        """Return all logits, float32 [N, V]; ``logits``: a result of ``of``."""
        return logits if self._slices is None else self._slices.gather(logits)


def states(made: object, claim: str, method: str) -> bool:
    """Return whether ``made`` has the member ``claim``, which is about its ``method``.

    A class that overrides the method does not inherit the claim.
    """
    definers = [
        next((kind for kind in type(made).__mro__ if name in vars(kind)), None)
        for name in (claim, method)
    ]
    claiming, defining = definers
    return claiming is not None and defining is not None and issubclass(claiming, defining)
