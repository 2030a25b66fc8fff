"""Runtime of the sampler "triton": one object per rank, driven by the engine loop."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from glowplug.core.protocols import Limits, Sampled, VocabularySlices
from glowplug.core.step.batch import Batch, LogprobTensors
from glowplug.core.step.request import MAX_LOGPROBS, SamplingParams
from glowplug.kernels.sampling import (
    edits as sampling_edits,
    logprobs as sampling_logprobs,
    reference,
)
from glowplug.kernels.sampling.cut_off import cut_off
from glowplug.kernels.sampling.draw import draw
from glowplug.kernels.sampling.greedy import best, best_edited, best_keys, best_of_keys
from glowplug.kernels.sampling.vocabulary_blocks import RowChoice, RowParameters
from glowplug.plugins.sampling.row_state import (
    GREEDY_BELOW,
    PROMPT_BIT,
    Feature,
    allowed_tokens,
    penalty_counts,
    send,
)
from glowplug.plugins.sampling.torch_sampler_runtime import (
    EDITS,
    FREQUENCY,
    MIN_LENGTH,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Tokens,
    TorchSampler,
)

FLAGS, ADDED, LISTED = EDITS  #: columns of the integer parameters
LIST_ENTRIES = 512  #: entries per row for biases and stop ids; more need reallocation
DRAWN = Feature.RANDOM | Feature.MIN_P
CUT = DRAWN | Feature.TOP_P | Feature.TOP_K
EDITED = Feature.PENALTIES | Feature.BIAS | Feature.ALLOWED | Feature.MIN_TOKENS
#: key -> features of a captured step, fewest first; a step replays the first entry that covers the
#: features of its rows
REPLAYED = {
    "greedy": Feature(0),
    "random": DRAWN,
    "top-p": DRAWN | Feature.TOP_P,
    "cut": CUT,
    "edited": CUT | EDITED,
    "scored": CUT | Feature.LOGPROBS,
}


class TritonSampler(TorchSampler):
    """``Sampler`` with fused Triton kernels.

    Edits and best token together take one kernel launch, each cut-off (top-k, top-p) takes eight,
    and the draw one. Nothing waits for the host. The rows' parameters are stored in tables at
    constant addresses, so that replayed graphs read the current values.
    """

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        rows = limits.rows
        device = self._device
        self._arrived = torch.zeros(rows * limits.width, dtype=torch.int32, device=device)
        self._table = torch.zeros(rows, limits.vocab, dtype=torch.int32, device=device)
        self._ids = torch.zeros(rows, LIST_ENTRIES, dtype=torch.int32, device=device)
        self._values = torch.zeros(rows, LIST_ENTRIES, device=device)
        self._moved = False
        floats = self._floats.device
        ints = self._ints.device
        self._parameters = RowParameters(
            floats[:, TEMPERATURE],
            floats[:, MIN_P],
            floats[:, TOP_P],
            ints[:, TOP_K],
            ints[:, SEED],
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile every sampling kernel now, so that no request waits for a compiler."""
        everything = SamplingParams(
            temperature=1.0, top_p=0.5, top_k=2, presence_penalty=1.0, logit_bias={0: 1.0}
        )
        self.join(0, everything, np.zeros(1, np.int32), 1, frozenset())
        self._floats.upload()
        self._ints.upload()
        none = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._step_logprobs = MAX_LOGPROBS
        for self._step in (CUT | Feature.LOGPROBS, CUT | EDITED):
            sampled = self.sample(torch.zeros(1, self._vocab, device=self._device), none, none)
            self.observe(
                sampled.tokens[:, None], torch.ones(1, dtype=torch.int32, device=self._device), none
            )
        self.leave(0)
        self._step = Feature(0)

    # ---- joining and leaving ---------------------------------------------------------------------

    def _join_edits(
        self,
        row: int,
        features: Feature,
        params: SamplingParams,
        tokens: Tokens,
        prompt_len: int,
        stop_ids: frozenset[int],
    ) -> tuple[int, int, int]:
        bias, stops = self._listed(params, stop_ids)
        self._write_list(row, [*bias, *stops], [*bias.values(), *stops.values()])
        flags = sampling_edits.LISTED if bias or stops else 0
        if features & Feature.PENALTIES:
            flags |= sampling_edits.PENALTIES
        if features & Feature.ALLOWED:
            flags |= sampling_edits.ALLOWED
        if features & (Feature.PENALTIES | Feature.ALLOWED):
            self._table[row] = send(
                self._entries(features, params, tokens, prompt_len), self._device
            )
        return flags, len(bias), len(bias) + len(stops)

    def _entries(
        self, features: Feature, params: SamplingParams, tokens: Tokens, prompt_len: int
    ) -> Tokens:
        """Return the row of ``RowEdits.table`` for a sequence, int32 [V].

        The entry of a token counts its occurrences for the penalties, and has marks for tokens of
        the prompt and for forbidden tokens.
        """
        counted = tokens if features & Feature.PENALTIES else tokens[:0]
        entries = penalty_counts(counted, prompt_len, self._vocab)
        if features & Feature.ALLOWED:
            entries[~allowed_tokens(params, self._vocab)] |= sampling_edits.FORBIDDEN
        return entries

    def _write_list(self, row: int, ids: list[int], values: list[float]) -> None:
        count = len(ids)
        if count > self._ids.shape[1]:
            more = (0, count - self._ids.shape[1])
            self._ids, self._values = (
                torch.nn.functional.pad(part, more) for part in (self._ids, self._values)
            )
            self._moved = True
        if count:
            self._ids[row, :count] = send(np.asarray(ids, np.int32), self._device)
            self._values[row, :count] = send(np.asarray(values, np.float32), self._device)

    def leave(self, row: int) -> None:
        """Reset the parameters of ``row``, so that captured steps may use the row as padding."""
        if self._flags[row]:
            self._floats.write(row, [0.0] * self._floats.host.shape[1])
            self._ints.write(row, [0] * self._ints.host.shape[1])
        super().leave(row)

    # ---- a step ----------------------------------------------------------------------------------

    def plan_step(self, batch: Batch) -> None:
        super().plan_step(batch)
        if self._step & Feature.LOGPROBS:
            # always the largest number: the kernel is compiled for one number of log-probabilities
            self._step_logprobs = MAX_LOGPROBS

    def capture_key(self) -> str | None:
        """Return the key of captured steps that have all sampling features of this step.

        None if no captured steps have them.

        NOTE: A replayed step runs all features of its key; parameters of a row disable those that
        the row does not use.
        """
        for key, features in REPLAYED.items():
            if not self._step & ~features and not (self._moved and features.edits):
                self._step = features
                return key
        return None

    takes_slices = TorchSampler.takes_slices

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
    ) -> Sampled:
        if self._slices is not None:
            return self._best_of_slices(logits, self._slices)
        step = self._step
        arrived = self._counters(len(logits))
        # NOTE: ``rows`` repeats a sequence's row for its draft tokens, expanded with stride 0.
        rows = rows.contiguous()
        positions = positions.contiguous()
        scored = bool(step & Feature.LOGPROBS)
        raw = logits.clone() if scored and step.edits else logits
        if step.edits:
            choice = best_edited(
                logits, arrived, rows, positions, _contiguous(ahead), self._edits()
            )
        else:
            choice = best(logits, arrived)
        for feature, count in ((Feature.TOP_K, True), (Feature.TOP_P, False)):
            if step & feature:
                cut_off(logits, choice, rows, self._parameters, GREEDY_BELOW, count, arrived)
        if step & Feature.RANDOM:
            draw(logits, choice, rows, positions, self._parameters, GREEDY_BELOW, arrived)
        logprobs = self._logprobs(raw, choice, arrived) if scored else None
        return Sampled(choice.tokens, choice.bad, logprobs)

    def _logprobs(self, raw: Tensor, choice: RowChoice, arrived: Tensor) -> LogprobTensors:
        """Return the log-probabilities of the chosen tokens; ``raw``: unedited logits [N, V]."""
        count = self._step_logprobs
        if self._step.edits:
            return LogprobTensors(*reference.token_logprobs(raw, choice.tokens, count))
        return LogprobTensors(
            *sampling_logprobs.token_logprobs(raw, choice.tokens, choice.peaks, count, arrived)
        )

    def _best_of_slices(self, logits: Tensor, slices: VocabularySlices) -> Sampled:
        keys = best_keys(logits, slices.shard.start, self._counters(len(logits)))
        return Sampled(*best_of_keys(slices.exchange(keys)))

    def observe(self, tokens: Tensor, counts: Tensor, rows: Tensor) -> None:
        if self._step & Feature.PENALTIES:
            sampling_edits.observe(
                tokens.contiguous(), counts.contiguous(), rows.contiguous(), self._edits()
            )

    def _edits(self) -> sampling_edits.RowEdits:
        floats = self._floats.device
        ints = self._ints.device
        return sampling_edits.RowEdits(
            ints[:, FLAGS],
            ints[:, MIN_LENGTH],
            ints[:, ADDED],
            ints[:, LISTED],
            floats[:, REPETITION],
            floats[:, FREQUENCY],
            floats[:, PRESENCE],
            self._ids,
            self._values,
            self._table,
        )

    def _counters(self, rows: int) -> Tensor:
        if len(self._arrived) < rows:
            self._arrived = torch.zeros(rows, dtype=torch.int32, device=self._device)
        return self._arrived


def _contiguous(ahead: Tensor | None) -> Tensor | None:
    return None if ahead is None else ahead.contiguous()


assert PROMPT_BIT == sampling_edits.IN_PROMPT
