"""Protocols of graph capture: the device work of a step, and the object that replays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.modes import Mode
from glowplug.core.protocols.sampling import Sampler
from glowplug.core.step.batch import Accepted, Batch
from glowplug.core.step.graph_pieces import DraftExtend, SplitPoints

if TYPE_CHECKING:
    from torch import Tensor


class Steps(Protocol):
    """The device work of a step, which a graph runner captures; the ``Runner`` has it.

    Attributes:
        sampler: the runner's sampler.
        device: torch device of the runner.
        split_points: the points at which a pass is split into pieces.
        draft_extend: a draft's pass over the tokens of a prefill step; a graph runner that captures
            it becomes its ``replacement``.
        forward: the target's pass over a step with prompts, which may be captured by itself:
            ``Model.forward`` or ``SampledLastLayer.trunk``.
    """

    sampler: Sampler
    device: Any
    split_points: SplitPoints
    draft_extend: DraftExtend

    @property
    def forward(self) -> Callable[[Tensor, Tensor, Batch], Tensor]:
        """The target's pass over a step with prompts, which may be captured by itself.

        It is ``Model.forward``, or ``SampledLastLayer.trunk``.
        """
        ...

    def step(self, batch: Batch) -> tuple[Accepted, Tensor]:
        """Run a batch, one piece of ``batch.pieces`` after another.

        The caller has set the batch's device fields (its tensors) and called ``Sampler.plan_step``.

        Returns:
            The accepted tokens, and the hidden states [T, hidden].
        """
        ...


class GraphRunner(Protocol):
    """A store of captured graphs.

    It keeps decode graphs: each has a padded batch in persistent memory and the CUDA graphs of the
    step's pieces. It also keeps piecewise graphs: passes of the model over a padded number of
    tokens, captured between the model's split points.
    """

    def shapes(self, plan: EnginePlan) -> list[tuple[Mode, int, int]]:
        """Return (mode, padded batch size, width) of each step to capture.

        The runner also captures passes of a model alone, without the rest of a step: of the target
        for the token counts ``Sizes.pass_tokens``, of a draft for ``Sizes.extend_tokens``.
        """
        ...

    def capture(self, steps: Steps, report: Callable[[int, int], None]) -> None:
        """Capture every shape.

        Args:
            steps: the work to capture.
            report: progress callback, called with (done, total).

        Raises:
            CaptureError: a capture failed.
        """
        ...

    def graph_for(self, batch: Batch) -> object | None:
        """Return the decode graph that can replay ``batch``, or None for an eager step.

        Ranks that agreed on a step get graphs of the same shape.
        """
        ...

    def fill(self, graph: object, batch: Batch) -> Batch:
        """Copy ``batch`` into the memory of a decode graph.

        Returns:
            The graph's own batch, with the rows of ``batch`` first and padding rows behind, ready
            for ``Steps.step``.
        """
        ...

    def pass_for(self, batch: Batch) -> Callable[[Tensor, Tensor, Batch], Tensor] | None:
        """Return a replacement for ``Steps.forward`` in a step that no decode graph replays.

        ``AttentionBackend.plan_step`` has been called with ``batch``, without padding. The
        replacement's result is valid until the next pass.

        Returns:
            The replacement; None: run ``Steps.forward`` itself.
        """
        ...

    def close(self) -> None:
        """Free all graphs and their memory."""
        ...
