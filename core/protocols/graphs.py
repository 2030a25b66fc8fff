"""Graphs: what of a step is captured, and what replays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols.sampling import Sampler
from glowplug.core.step.batch import Accepted, Batch
from glowplug.core.step.graph_pieces import Cuts, Extension

if TYPE_CHECKING:
    from torch import Tensor


class Steps(Protocol):
    """What a graph runner captures: the ``Runner``'s device part of a step.

    Attributes:
        sampler: as the runner uses it.
        device: torch device it runs on.
        forward: the target's pass over a step with prompts in it, which may also be captured by
            itself: ``Model.forward``, or ``SampledLastLayer.trunk``.
        cuts: where such a pass is cut into pieces.
        extension: a draft's pass over the tokens of such a step; a runner that captures it becomes
            its taker.
    """

    sampler: Sampler
    device: Any
    cuts: Cuts
    extension: Extension

    @property
    def forward(self) -> Callable[[Tensor, Tensor, Batch], Tensor]: ...

    def step(self, batch: Batch) -> tuple[Accepted, Tensor]:
        """Run a batch whose device fields are filled in, piece by piece through ``batch.segments``:
        what it yields, and its hidden states [T, hidden]. ``Sampler.plan_step`` comes before it."""
        ...


class GraphRunner(Protocol):
    """Keeps slots: padded batches over fixed memory, with graphs of the pieces of their step; and
    passes of the model over a padded number of tokens, replayed in pieces between its cuts."""

    def shapes(self, plan: EnginePlan) -> list[tuple[Mode, int, int]]:
        """(mode, padded batch, width) to capture; passes alone are those of ``Sizes.pass_tokens``
        and ``Sizes.extend_tokens``."""
        ...

    def capture(self, steps: Steps, report: Callable[[int, int], None]) -> None:
        """Capture every shape; ``report`` hears of (done, total). CaptureError when one fails."""
        ...

    def slot_for(self, batch: Batch) -> object | None:
        """The captured slot that can replay ``batch``, or None for an eager step. Ranks that agreed
        on a step get slots of the same shape."""
        ...

    def fill(self, slot: object, batch: Batch) -> Batch:
        """The slot's own batch, holding the rows of ``batch`` first and then padding; ready for
        ``Steps.step``.
        """
        ...

    def pass_for(self, batch: Batch) -> Callable[[Tensor, Tensor, Batch], Tensor] | None:
        """For a step that no slot replays: what stands for ``Steps.forward`` in it, or None for
        that itself. Attention has planned the step as it is, and what comes back is valid until the
        next pass."""
        ...

    def close(self) -> None: ...
