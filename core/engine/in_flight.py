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
        found = (
            [part.numpy() for part in tensors_of(self.accepted)]
            if self.copy is None
            else self.copy.wait()
        )
        if len(found) == 1:
            found = unpack(found[0], *self.accepted.tokens.shape)
        # NOTE: rows behind those of the batch are padding rows of a captured step
        rows = self.batch.num_rows
        scores = found[3:]
        if scores:
            scores = [part[: rows * self.accepted.tokens.shape[1]] for part in scores]
        logprobs = (scores[0], scores[1], scores[2]) if scores else None
        return StepResult(
            found[0][:rows], found[1][:rows], found[2][:rows], logprobs, self.prompt_logprobs
        )


def tensors_of(accepted: Accepted) -> list[torch.Tensor]:
    """Return the tensors of a step's results that the host reads.

    These are ``tokens``, ``counts`` and ``bad``, and the log-probabilities if there are any. If
    there are none and ``packed`` is set, it is the only one, since it contains the other three.
    """
    scores = accepted.logprobs
    if accepted.packed is not None and scores is None:
        return [accepted.packed]
    found = [accepted.tokens, accepted.counts, accepted.bad]
    return found if scores is None else [*found, scores.token, scores.top_ids, scores.top]


def pack(accepted: Accepted) -> torch.Tensor:
    """Return the bytes of tokens, counts and bad as one tensor, for ``Accepted.packed``.

    Its shape is uint8 [B * (8 * W + 5)]: 13 bytes per row at width one.
    """
    parts = (accepted.tokens, accepted.counts, accepted.bad)
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def unpack(packed: NDArray[Any], rows: int, width: int) -> list[NDArray[Any]]:
    """Split ``packed`` into tokens int64 [rows, width], counts int32 [rows] and bad bool [rows]."""
    tokens = 8 * rows * width
    counts = 4 * rows
    return [
        packed[:tokens].view(np.int64).reshape(rows, width),
        packed[tokens : tokens + counts].view(np.int32),
        packed[tokens + counts :].view(np.bool_),
    ]
