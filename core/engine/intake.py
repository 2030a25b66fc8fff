"""Sequences on their way to the scheduler: routed, and held until their grammar is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from glowplug.core.engine.grammars import RankGrammars
from glowplug.core.engine.stalls import StallWatch
from glowplug.core.errors import ComponentFailed, RequestError
from glowplug.core.protocols import RequestRouter, Scheduler
from glowplug.core.step.messages import Abort, Finished, StepOutput, Submit
from glowplug.core.step.request import Sequence

GRAMMAR_CODE = "grammar"  #: error code of a sequence whose grammar cannot be followed


class Intake:
    """Queues the sequences of the front end's messages.

    Args:
        scheduler: the scheduler of this rank's group.
        router: chooses the group of each sequence; None without groups.
        clock: the common time of the ranks.
        stalls: watches the queued sequences.
        grammars: the grammars of this rank.
        leads: this rank reports the ends of sequences that belong to no group yet.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        router: RequestRouter | None,
        clock: Callable[[], float],
        stalls: StallWatch,
        grammars: RankGrammars,
        leads: bool,
    ) -> None:
        self._scheduler = scheduler
        self._router = router
        self._clock = clock
        self._stalls = stalls
        self._grammars = grammars
        self._leads = leads

    def submit(self, message: Submit) -> StepOutput | None:
        """Queue a new sequence, or hold it; return its end if it is refused."""
        sequence = Sequence(
            id=message.id,
            prompt=message.prompt_ids,
            params=message.params,
            admission=message.admission,
            arrival=self._clock(),
            stop_ids=frozenset(message.stop_ids),
        )
        if sequence.params.grammar is None:
            return self._add(sequence)
        try:
            self._grammars.hold(sequence)
        except RequestError as error:
            return _refused(sequence.id, error) if self._leads else None
        return None

    def release(self, ready: Seq[tuple[int, str]]) -> list[StepOutput]:
        """Queue the sequences whose grammar is compiled; return the ends of those refused.

        ``ready``: ``Turn.grammars``.
        """
        found = []
        for sequence, error in self._grammars.release(ready):
            if not error:
                found.append(self._add(sequence))
            elif self._leads:
                found.append(_refused(sequence.id, RequestError(error)))
        return [end for end in found if end is not None]

    def abort(self, message: Abort) -> StepOutput | None:
        """End sequences, held ones included; return their ends."""
        held = self._grammars.drop(message.ids)
        ended = self._scheduler.abort(message)
        if not held or not self._leads:
            return ended
        output = ended or StepOutput()
        output.finished += [Finished(id, message.reason) for id in held]
        return output

    def end_failed(self, unsampled: dict[int, ComponentFailed]) -> StepOutput | None:
        """End the sequences for which a launched step has failed; return their ends.

        Args:
            unsampled: sequences that the sampler could not take, which are removed from it; those
                whose grammar has failed are in the masks.
        """
        masks = self._grammars.masks
        if not unsampled and (masks is None or not masks.failed):
            return None
        failed: dict[int, RequestError] = {}
        if masks is not None:
            for id, reason in masks.failed:
                text = f"the grammar of the request cannot be followed: {reason}"
                failed[id] = RequestError(text, code=GRAMMAR_CODE)
            masks.failed = []
        failed.update(unsampled)
        unsampled.clear()
        output = self._scheduler.abort(Abort(list(failed), "error"))
        for end in output.finished if output is not None else ():
            if end.error_code is None:
                end.error = str(failed[end.id])
                end.error_code = failed[end.id].code
        return output

    def _add(self, sequence: Sequence) -> StepOutput | None:
        """Queue a sequence if it belongs to this rank's group; return its end if it is refused."""
        if self._router is not None and not self._router.owns(sequence):
            return None
        try:
            self._scheduler.add(sequence)
        except RequestError as error:
            return _refused(sequence.id, error)
        self._stalls.live[sequence.id] = sequence
        return None


def _refused(id: int, error: RequestError) -> StepOutput:
    return StepOutput(finished=[Finished(id, "error", error=str(error), error_code=error.code)])
