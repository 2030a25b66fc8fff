"""The rows of a rank's sampler, which sequences join and leave."""

from __future__ import annotations

from glowplug.core.errors import ComponentFailed
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Sampler
from glowplug.core.speculation.simulated import SimulatedAcceptance
from glowplug.core.step.batch import Batch
from glowplug.core.step.request import SamplingParams, Sequence

#: parameters of a row whose sequence the sampler could not take
NEUTRAL = SamplingParams(temperature=0.0)


class SamplerRows:
    """The sampler's host work of each step.

    If ``Sampler.join`` raises an exception, the row is set up anew with ``NEUTRAL`` for the step
    that is being launched, and the engine ends the sequence after the launch. Its tokens are
    dropped. A sampler that fails again ends the engine.

    Args:
        sampler: the sampler.
        simulated: the simulated acceptance of drafts; None: they are verified.
        plan: names the sampler; None: exceptions are not caught.

    Attributes:
        failed: id of a sequence that the sampler could not take -> error; the engine takes them.
        simulated: as given.
    """

    def __init__(
        self,
        sampler: Sampler,
        simulated: SimulatedAcceptance | None,
        plan: EnginePlan | None,
    ) -> None:
        self.failed: dict[int, ComponentFailed] = {}
        self._sampler = sampler
        self.simulated = simulated
        self._plan = plan

    def plan_step(self, batch: Batch) -> None:
        """Let sequences leave and join their rows, then do the sampler's work for the step."""
        for row in batch.left:
            self._sampler.leave(row)
        for sequence in batch.joined:
            if sequence.row >= 0:
                self._join(sequence)
        self._sampler.plan_step(batch)

    def _join(self, sequence: Sequence) -> None:
        row = sequence.row
        tokens = sequence.all_tokens()
        prompt = len(sequence.prompt)
        try:
            self._sampler.join(row, sequence.params, tokens, prompt, sequence.stop_ids)
        except Exception as error:
            if self._plan is None:
                raise
            self.failed[sequence.id] = self._plan.failed_call("sampling", "join", error)
            self._sampler.leave(row)
            self._sampler.join(row, NEUTRAL, tokens, prompt, frozenset())
        if self.simulated is not None:
            self.simulated.join(row, sequence.params)
