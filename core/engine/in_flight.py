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
        accepted = self.accepted
        found = (
            [part.numpy() for part in tensors_of(accepted)]
            if self.copy is None
            else self.copy.wait()
        )
        if len(found) == 1:
            given = 0 if accepted.drafts is None else len(accepted.drafts)
            rows, width = accepted.tokens.shape
            found = unpack(found[0], rows, width, given)
        # NOTE: rows behind those of the batch are padding rows of a captured step
        rows = self.batch.num_rows
        tokens, counts, bad = (part[:rows] for part in found[:3])
        drafts = None if accepted.drafts is None else found[3][: self.batch.num_decodes]
        scores = None
        if accepted.logprobs is not None:
            token, top_ids, top = (part[: rows * accepted.tokens.shape[1]] for part in found[-3:])
            scores = token, top_ids, top
        return StepResult(tokens, counts, bad, scores, self.prompt_logprobs, drafts)


def tensors_of(accepted: Accepted) -> list[torch.Tensor]:
    """Return the tensors of a step's results that the host reads.

    These are ``tokens``, ``counts`` and ``bad``, and ``drafts`` and the log-probabilities if there
    are any. If there are no log-probabilities and ``packed`` is set, it is the only one, since it
    contains the others.
    """
    scores = accepted.logprobs
    if accepted.packed is not None and scores is None:
        return [accepted.packed]
    found = [accepted.tokens, accepted.counts, accepted.bad]
    if accepted.drafts is not None:
        found.append(accepted.drafts)
    return found if scores is None else [*found, scores.token, scores.top_ids, scores.top]


def pack(accepted: Accepted) -> torch.Tensor:
    """Return the bytes of tokens, counts, drafts and bad as one tensor, for ``Accepted.packed``.

    Its shape is uint8 [B * (8 * W + 5)], 13 bytes per row at width one, or with ``drafts`` 4 bytes
    more for each decoding row.
    """
    parts = [accepted.tokens, accepted.counts, accepted.bad]
    if accepted.drafts is not None:
        parts.insert(2, accepted.drafts)  # before the bytes, so that integers stay aligned
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def unpack(packed: NDArray[Any], rows: int, width: int, drafts: int = 0) -> list[NDArray[Any]]:
    """Split ``packed`` into tokens, counts, bad and drafts.

    Returns:
        int64 [rows, width], int32 [rows], bool [rows], and int32 [drafts], which is left out if
        ``drafts`` is 0.
    """
    tokens, numbers, bad = np.split(packed, np.cumsum([8 * rows * width, 4 * (rows + drafts)]))
    counts, given = np.split(numbers.view(np.int32), [rows])
    parts: list[NDArray[Any]] = [tokens.view(np.int64).reshape(rows, width), counts]
    parts.append(bad.view(np.bool_))
    return [*parts, given] if drafts else parts
