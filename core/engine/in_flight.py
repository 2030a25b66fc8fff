"""A launched step, and its results on the way to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glowplug.core.step.batch import Accepted, Batch, PromptLogprobs, StepResult
from glowplug.core.step.to_host import Copy


@dataclass(eq=False)
class InFlight:
    """A launched step, with its results on the way to the host."""

    batch: Batch
    accepted: Accepted
    prompt_logprobs: list[PromptLogprobs]
    copy: Copy | None  #: copy of the results to the host; None if the device is the host
    #: rows of the batch behind which a grammar forces tokens (``core.speculation.forced_drafts``)
    forced: list[int] = field(default_factory=list, init=False)
    _result: StepResult | None = field(default=None, init=False)

    @property
    def waited(self) -> float | None:
        """Seconds without device work before the step; None if the device is the CPU.

        The value is valid once ``wait`` has returned.
        """
        return None if self.copy is None else self.copy.waited()

    def wait(self) -> StepResult:
        """Wait for the results and return them, in later calls without waiting.

        The first call comes before ``to_host.BUFFERS`` later steps are launched.
        """
        if self._result is None:
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        accepted = self.accepted
        found = (
            [part.numpy() for part in tensors_of(accepted)]
            if self.copy is None
            else self.copy.wait()
        )
        if len(found) == 1:
            found = unpack(found[0], accepted)
        # NOTE: rows behind those of the batch are padding rows of a captured step
        rows = self.batch.num_rows
        tokens, counts, bad = (part[:rows] for part in found[:3])
        further = iter(found[3:])
        drafts = None if accepted.drafts is None else next(further)[: self.batch.num_decodes]
        ahead = None if accepted.next_drafts is None else next(further)[:rows]
        scores = None
        if accepted.logprobs is not None:
            token, top_ids, top = (part[: rows * accepted.tokens.shape[1]] for part in further)
            scores = token, top_ids, top
        ahead = self._with_forced(ahead)
        return StepResult(tokens, counts, bad, scores, self.prompt_logprobs, drafts, ahead)

    def _with_forced(self, drafts: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
        """Return ``drafts`` [B] with at least one in each row that has forced tokens."""
        if drafts is None or not self.forced:
            return drafts
        drafts = drafts.copy()
        drafts[self.forced] = np.maximum(drafts[self.forced], 1)
        return drafts


def tensors_of(accepted: Accepted) -> list[torch.Tensor]:
    """Return the tensors of a step's results that the host reads.

    These are ``tokens``, ``counts`` and ``bad``, then ``drafts``, ``next_drafts`` and the
    log-probabilities if there are any. If there are no log-probabilities and ``packed`` is set, it
    is the only one, since it contains the others.
    """
    scores = accepted.logprobs
    if accepted.packed is not None and scores is None:
        return [accepted.packed]
    found = [accepted.tokens, accepted.counts, accepted.bad, *_draft_counts(accepted)]
    return found if scores is None else [*found, scores.token, scores.top_ids, scores.top]


def _draft_counts(accepted: Accepted) -> list[torch.Tensor]:
    """Return those of ``drafts`` and ``next_drafts`` that are set, int32."""
    return [part for part in (accepted.drafts, accepted.next_drafts) if part is not None]


def pack(accepted: Accepted) -> torch.Tensor:
    """Return the bytes of a step's results as one tensor, for ``Accepted.packed``.

    It is uint8 [B * (8 * W + 5)], 13 bytes per row at width one; ``drafts`` take 4 bytes more for
    each decoding row, and ``next_drafts`` for each row.
    """
    # the bytes of ``bad`` are last, so that integers stay aligned
    parts = [accepted.tokens, accepted.counts, *_draft_counts(accepted), accepted.bad]
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def unpack(packed: NDArray[Any], accepted: Accepted) -> list[NDArray[Any]]:
    """Return the parts of ``packed``, in the order of ``tensors_of``.

    ``accepted``: the results from which ``pack`` made it; only shapes are read.
    """
    rows, width = accepted.tokens.shape
    lengths = [rows, *(len(part) for part in _draft_counts(accepted))]
    tokens, numbers, bad = np.split(packed, np.cumsum([8 * rows * width, 4 * sum(lengths)]))
    counts, *further = np.split(numbers.view(np.int32), np.cumsum(lengths)[:-1])
    parts: list[NDArray[Any]] = [tokens.view(np.int64).reshape(rows, width), counts]
    return [*parts, bad.view(np.bool_), *further]
