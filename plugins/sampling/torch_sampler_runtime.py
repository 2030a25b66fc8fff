"""Runtime of the sampler "torch": one object per rank, driven by the engine loop."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Limits, Sampled, VocabularySlices, Worker
from glowplug.core.step.batch import Batch, LogprobTensors
from glowplug.core.step.request import SamplingParams
from glowplug.kernels.sampling import reference as sampling_reference
from glowplug.plugins.sampling.row_state import (
    GREEDY_BELOW,
    PROMPT_BIT,
    Column,
    Feature,
    SparseRowState,
    TokenLists,
    allowed_tokens,
    features_of,
    penalty_counts,
)
from glowplug.plugins.sampling.torch_sampler import TorchSamplerOptions

#: columns of the float parameters
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
#: columns of the integer parameters; each sampler defines its EDITS columns
TOP_K, SEED, MIN_LENGTH, *EDITS = range(6)
PENALTY_ENTRY, ALLOWED_ENTRY, _ = EDITS
SIGN_BIT = 1 << 63  #: of int64
#: features of a step that graphs can hold -> its capture key: such a step's kernels read only the
#: rows' columns, whose addresses are constant
CAPTURED = {Feature(0): "greedy", Feature.RANDOM: "random"}
#: smallest exponent of a weight. On CPUs torch takes 0.2 ms for exp(-inf) of 32 x 2048 entries,
#: 2 ms if the results are subnormal, and 0.01 ms for others
FAINT = -80.0
NEVER = 1e-34  #: weights below are 0; e^FAINT is. The largest weight is 1
Tokens = NDArray[np.int32]


class TorchSampler:
    """``Sampler`` in plain torch; see ``protocols.Sampler``.

    Edits are applied in vLLM's order: allowed tokens, min_tokens, bias, penalties, temperature,
    min-p, top-k, top-p. Log-probabilities are those of the raw logits, before any edit.
    """

    def __init__(self, options: TorchSamplerOptions, plan: EnginePlan, worker: Worker) -> None:
        self._device = torch.device(worker.device)
        self._default_seed = plan.seed

    def reserve(self, limits: Limits) -> None:
        rows = limits.rows
        device = self._device
        self._vocab = limits.vocab
        self._width = limits.width
        self._floats = Column(rows, 6, np.float32, device)
        self._ints = Column(rows, 3 + len(EDITS), np.int64, device)
        self._flags = np.zeros(rows, np.int64)
        self._min_length = np.zeros(rows, np.int64)
        self._top_logprobs = np.zeros(rows, np.int64)
        self._bias = TokenLists(rows, device)
        self._stops = TokenLists(rows, device)
        self._penalties = SparseRowState(rows, limits.vocab, torch.int32, 0, device)
        self._allowed = SparseRowState(rows, limits.vocab, torch.bool, 1, device)
        self._step = Feature(0)
        self._step_logprobs = 0
        #: the division of the vocabulary in a step over slices; None: the step has all logits
        self._slices: VocabularySlices | None = None

    # ---- joining and leaving: the only work that depends on a sequence's length ------------------

    def join(
        self,
        row: int,
        params: SamplingParams,
        tokens: NDArray[np.int32],
        prompt_len: int,
        stop_ids: frozenset[int],
    ) -> None:
        features = features_of(params, stop_ids)
        min_length = prompt_len + params.min_tokens
        self.leave(row)
        self._flags[row] = features
        self._min_length[row] = min_length
        self._top_logprobs[row] = params.logprobs or 0
        self._floats.write(
            row,
            [
                params.temperature,
                params.top_p,
                params.min_p,
                params.presence_penalty,
                params.frequency_penalty,
                params.repetition_penalty,
            ],
        )
        self._ints.write(
            row,
            [
                max(params.top_k, 0),
                self._seed(params),
                min_length,
                *self._join_edits(row, features, params, tokens, prompt_len, stop_ids),
            ],
        )

    def _seed(self, params: SamplingParams) -> int:
        """Return the request's seed, or the engine's if it has none, wrapped to int64."""
        seed = self._default_seed if params.seed is None else params.seed
        return (seed + SIGN_BIT) % (1 << 64) - SIGN_BIT

    def _join_edits(
        self,
        row: int,
        features: Feature,
        params: SamplingParams,
        tokens: Tokens,
        prompt_len: int,
        stop_ids: frozenset[int],
    ) -> tuple[int, int, int]:
        """Store the values with which the logits of the new row ``row`` are edited.

        The edits are bias, penalties, allowed tokens, and stop tokens forbidden until
        ``min_tokens``.

        Returns:
            The row's values in the parameter columns that ``EDITS`` names.
        """
        bias, stops = self._listed(params, stop_ids)
        self._bias.write(row, bias)
        self._stops.write(row, stops)
        penalties = allowed = 0
        if features & Feature.PENALTIES:
            penalties = self._penalties.write(row, penalty_counts(tokens, prompt_len, self._vocab))
        if features & Feature.ALLOWED:
            allowed = self._allowed.write(row, allowed_tokens(params, self._vocab))
        return penalties, allowed, 0

    def _listed(
        self, params: SamplingParams, stop_ids: frozenset[int]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the numbers to add to a row's logits, by token id.

        Returns:
            Numbers that are always added (the bias), and numbers that are added until
            ``min_tokens`` is reached.
        """
        bias = {
            token: value
            for token, value in (params.logit_bias or {}).items()
            if token < self._vocab
        }
        stops = [token for token in stop_ids if token < self._vocab] if params.min_tokens else []
        return bias, dict.fromkeys(stops, float("-inf"))

    def leave(self, row: int) -> None:
        self._flags[row] = 0
        self._penalties.leave(row)
        self._allowed.leave(row)

    # ---- a step ----------------------------------------------------------------------------------

    def plan_step(self, batch: Batch) -> None:
        """Set the sampling features that the rows of ``batch`` need, and upload changed rows."""
        rows = batch.rows[batch.samples]
        flags = Feature(int(np.bitwise_or.reduce(self._flags[rows], initial=0)))
        if flags & Feature.MIN_TOKENS:
            # NOTE: kv_lens may exceed the real length by a step's draft tokens; the margin of two
            # widths covers that.
            early = batch.kv_lens[batch.samples] - 2 * self._width < self._min_length[rows]
            if not early.any():
                flags &= ~Feature.MIN_TOKENS
        self._step = flags
        self._slices = None
        self._step_logprobs = (
            int(self._top_logprobs[rows].max(initial=0)) if flags & Feature.LOGPROBS else 0
        )
        self._floats.upload()
        self._ints.upload()

    def capture_key(self) -> str | None:
        return CAPTURED.get(self._step)

    def takes_slices(self, slices: VocabularySlices) -> bool:
        """Let a greedy step sample from slices of the vocabulary; see ``protocols.Sampler``."""
        self._slices = None if self._step else slices
        return self._slices is not None

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
    ) -> Sampled:
        if self._slices is not None:
            return self._best_of_slices(logits, self._slices)
        step = self._step
        raw = logits.clone() if step & Feature.LOGPROBS and step.edits else logits
        if step.edits:
            self._edit(logits, rows, positions, ahead)
        tokens, bad = self._choose(logits, rows, positions)
        logprobs = None
        if step & Feature.LOGPROBS:
            logprobs = LogprobTensors(
                *sampling_reference.token_logprobs(raw, tokens, self._step_logprobs)
            )
        return Sampled(tokens, bad, logprobs)

    def _best_of_slices(self, logits: Tensor, slices: VocabularySlices) -> Sampled:
        """Return the most likely tokens; ``logits``: those of this rank's slice, [N, size]."""
        keys = sampling_reference.best_keys(logits, slices.shard.start)
        return Sampled(*sampling_reference.best_of_keys(slices.exchange(keys)))

    def _edit(self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None) -> None:
        step = self._step
        floats = self._floats.device[rows]
        ints = self._ints.device[rows]
        if step & Feature.ALLOWED:
            logits.masked_fill_(~self._allowed.state[ints[:, ALLOWED_ENTRY]], float("-inf"))
        if step & Feature.MIN_TOKENS:
            self._stops.add(logits, rows, positions < ints[:, MIN_LENGTH])
        if step & Feature.BIAS:
            self._bias.add(logits, rows)
        if step & Feature.PENALTIES:
            state = self._penalties.state[ints[:, PENALTY_ENTRY]]
            if ahead is not None:
                state.scatter_add_(1, ahead.clamp(min=0), (ahead >= 0).int())
            sampling_reference.apply_penalties(
                logits,
                state > 0,
                state & (PROMPT_BIT - 1),
                floats[:, REPETITION],
                floats[:, FREQUENCY],
                floats[:, PRESENCE],
            )

    def _choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a token for each row of the edited logits.

        Returns:
            Tokens int64 [N], and bool [N]: True if the row has no finite element, or has a NaN.
        """
        tokens = logits.argmax(-1)
        peak = logits.gather(1, tokens[:, None])
        bad = (peak - peak).squeeze(1) != 0  # infinity minus itself is NaN, which is not 0
        if self._step & Feature.RANDOM:
            tokens = self._draw(logits, peak, tokens, rows, positions)
        return tokens, bad

    def _draw(
        self, logits: Tensor, peak: Tensor, best: Tensor, rows: Tensor, positions: Tensor
    ) -> Tensor:
        """Return a token for each row: a randomly drawn one, or for greedy rows that of ``best``.

        Args:
            logits: edited logits, float32 [N, V].
            peak: largest logit of each row, [N, 1].
            best: most likely token of each row, int64 [N].
            rows: rows of the sequence table, int64 [N].
            positions: positions of the drawn tokens, int64 [N].

        Returns:
            int64 [N].
        """
        floats = self._floats.device[rows]
        ints = self._ints.device[rows]
        greedy = floats[:, TEMPERATURE] < GREEDY_BELOW
        temperature = torch.where(greedy, 1.0, floats[:, TEMPERATURE])
        weights = _weights((logits - peak).div_(temperature[:, None]))
        if self._step & Feature.MIN_P:
            weights.masked_fill_(weights < floats[:, MIN_P, None], 0.0)
        if self._step & (Feature.TOP_K | Feature.TOP_P):
            least = sampling_reference.cutoff(weights, ints[:, TOP_K], floats[:, TOP_P])
            weights.masked_fill_(weights < least[:, None], 0.0)
        return torch.where(
            greedy,
            best,
            sampling_reference.draw(weights, sampling_reference.uniform(ints[:, SEED], positions)),
        )

    def observe(self, tokens: Tensor, counts: Tensor, rows: Tensor) -> None:
        if not self._step & Feature.PENALTIES:
            return
        entries = self._ints.device[rows, PENALTY_ENTRY]
        valid = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        index = entries[:, None] * self._vocab + tokens
        self._penalties.state.view(-1).index_add_(
            0, index.reshape(-1), valid.reshape(-1).to(torch.int32)
        )


def _weights(exponents: Tensor) -> Tensor:
    """Replace ``exponents``, at most 0, by their exponentials, those below ``NEVER`` by 0."""
    return torch.threshold_(exponents.clamp_(min=FAINT).exp_(), NEVER, 0.0)
