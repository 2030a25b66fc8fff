"""Runtime of the speculative algorithm "none"."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Limits, Model, ModelFamily, Sampler, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.speculation.verify import spread
from glowplug.core.step.batch import Accepted, Batch, LogprobTensors
from glowplug.core.step.to_device import send
from glowplug.plugins.speculative.none import NoSpeculationOptions


class NoSpeculation:
    """The ``protocols.SpeculativeAlgorithm`` that drafts nothing: each row computes one token.

    A row's last token stays on the device, as the input of the row's next step.
    """

    passes_rows = True

    def __init__(self, options: NoSpeculationOptions, plan: EnginePlan, worker: Worker) -> None:
        self._device = torch.device(worker.device)

    def width(self) -> int:
        return 1

    def reserve(self, limits: Limits) -> None:
        self._last = torch.zeros(limits.rows, 1, dtype=torch.int64, device=self._device)
        self._ones = torch.ones(limits.rows, dtype=torch.int32, device=self._device)

    def lengths(self, batch: Batch) -> Tensor | None:
        return None

    def draft(self, batch: Batch) -> Tensor:
        return self._last[batch.row_ids[: batch.num_decodes]]

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        accept = self._accept_all if batch.samples.all() else self._accept_some
        accepted = accept(logits, batch, sampler)
        sampler.observe(accepted.tokens, accepted.counts, batch.row_ids)
        return accepted

    def _accept_all(self, logits: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        sampled = sampler.sample(logits, batch.row_ids, batch.kv_lens_device.long())
        tokens = sampled.tokens[:, None]
        self._last[batch.row_ids] = tokens
        return Accepted(tokens, self._ones[: batch.num_rows], sampled.bad, sampled.logprobs)

    def _accept_some(self, logits: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        """Accept tokens in a step with prefill rows whose chunk does not end the prompt.

        These rows have no logits and gain no token.
        """
        where = send([np.flatnonzero(batch.samples).astype(np.int64)], self._device)[0]
        rows = batch.row_ids[where]
        sampled = sampler.sample(logits, rows, batch.kv_lens_device[where].long())
        self._last[rows] = sampled.tokens[:, None]
        size = batch.num_rows
        return Accepted(
            spread(sampled.tokens, where, size)[:, None],
            spread(self._ones[: len(where)], where, size),
            spread(sampled.bad, where, size),
            None
            if sampled.logprobs is None
            else LogprobTensors(
                *(
                    spread(part, where, size)
                    for part in (
                        sampled.logprobs.token,
                        sampled.logprobs.top_ids,
                        sampled.logprobs.top,
                    )
                )
            ),
        )

    def draft_model(
        self, context: BuildContext, family: ModelFamily, target: Model
    ) -> Model | None:
        return None
