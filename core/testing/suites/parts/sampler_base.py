"""Base of the conformance suite of the ``sampling`` slot: a driver and naive definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Limits, Sampled, Sampler
from glowplug.core.step.batch import Batch
from glowplug.core.step.request import SamplingParams

VOCAB = 37  #: small enough for a chi-square test, and a prime number
ROWS = 40
DRAWS = 20_000


def decode_batch(rows: Seq[int], positions: Seq[int]) -> Batch:
    """Return a step in which each of ``rows`` draws the token at its position."""
    count = len(rows)
    return Batch(
        step=0,
        mode=Mode.DECODE,
        rows=np.asarray(rows, np.int32),
        epochs=np.zeros(count, np.int64),
        num_decodes=count,
        query_lens=np.ones(count, np.int32),
        kv_lens=np.asarray(positions, np.int32),
        samples=np.ones(count, np.bool_),
        prompt_ids=np.zeros(0, np.int32),
        pages=np.zeros((count, 1), np.int32),
    )


def make_params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1000, "seed": 7, **changes})  # type: ignore[arg-type]


class Driver:
    """A reserved sampler, driven as the engine drives it."""

    def __init__(self, sampler: Sampler, vocab: int, device: str) -> None:
        self.sampler = sampler
        self.device = torch.device(device)
        sampler.reserve(Limits(rows=ROWS, context=DRAWS + 100, num_pages=8, width=1, vocab=vocab))

    def join(
        self,
        row: int,
        params: SamplingParams,
        prompt: Seq[int] = (1, 2),
        output: Seq[int] = (),
        stops: Seq[int] = (),
    ) -> None:
        tokens = np.asarray([*prompt, *output], np.int32)
        self.sampler.join(row, params, tokens, len(prompt), frozenset(stops))

    def step(self, rows: Seq[int], positions: Seq[int], logits: Tensor) -> Sampled:
        """Plan and sample one step; return CPU results. ``logits`` is not changed."""
        self.sampler.plan_step(decode_batch(rows, positions))
        return self.again(rows, positions, logits)

    def again(self, rows: Seq[int], positions: Seq[int], logits: Tensor) -> Sampled:
        on = self.device
        row_ids = torch.tensor(rows, dtype=torch.int64, device=on)
        sampled = self.sampler.sample(
            logits.clone().to(on), row_ids, torch.tensor(positions, dtype=torch.int64, device=on)
        )
        sampled.tokens = sampled.tokens.cpu()
        sampled.bad = sampled.bad.cpu()
        if sampled.logprobs is not None:
            part = sampled.logprobs
            part.token = part.token.cpu()
            part.top_ids = part.top_ids.cpu()
            part.top = part.top.cpu()
        return sampled

    def sample(
        self, rows: Tensor, positions: Tensor, logits: Tensor, ahead: Tensor | None = None
    ) -> list[int]:
        """Return the tokens that a planned step draws.

        Args:
            rows: int64 [N], on the device.
            positions: int64 [N], on the device.
            logits: [N, V], not changed.
            ahead: drafts before each position; see ``Sampler.sample``.
        """
        given = (logits.clone().to(self.device), rows, positions)
        sampled = (
            self.sampler.sample(*given) if ahead is None else self.sampler.sample(*given, ahead)
        )
        drawn: list[int] = sampled.tokens.tolist()
        return drawn

    def many(self, row: int, logits: Tensor, draws: int = DRAWS) -> NDArray[np.int64]:
        """Return the tokens that ``row`` draws at positions 2, 3, ... from the same logits."""
        self.sampler.plan_step(decode_batch([row], [2]))
        sampled = self.again([row] * draws, range(2, draws + 2), logits.expand(draws, -1))
        return np.asarray(sampled.tokens.numpy(), np.int64)

    def observe(self, rows: Seq[int], tokens: Seq[int]) -> None:
        on = self.device
        self.sampler.observe(
            torch.tensor(tokens, device=on)[:, None],
            torch.ones(len(rows), dtype=torch.int32, device=on),
            torch.tensor(rows, device=on),
        )


def naive_logits(
    logits: NDArray[np.float64],
    params: SamplingParams,
    prompt: Seq[int],
    output: Seq[int],
    stops: Seq[int],
) -> NDArray[np.float64]:
    """Return ``logits`` edited token by token, as the parameters are defined.

    The edits are allowed tokens, min_tokens, bias, and repetition, frequency and presence penalty.
    """
    edited = logits.copy()
    bias = params.logit_bias or {}
    repetition = params.repetition_penalty
    for token in range(len(edited)):
        value = edited[token]
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = -math.inf
        if token in stops and len(output) < params.min_tokens:
            value = -math.inf
        value += bias.get(token, 0.0)
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= list(output).count(token) * params.frequency_penalty
        value -= (token in output) * params.presence_penalty
        edited[token] = value
    return edited


def naive_distribution(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """Return the probabilities of all tokens.

    The steps are temperature, then min-p, top-k and top-p, each applied to the tokens still left.
    """
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs[probs < params.min_p * probs.max()] = 0.0
    if params.top_k > 0:
        probs[np.argsort(-probs, kind="stable")[params.top_k :]] = 0.0
    order = np.argsort(-probs, kind="stable")
    share = np.cumsum(probs[order]) / probs.sum()
    if params.top_p < 1.0:
        probs[order[int(np.sum(share < params.top_p)) + 1 :]] = 0.0
    return np.asarray(probs / probs.sum())


def chi_square_limit(freedom: int) -> float:
    """Return the chi-square value exceeded with probability 1e-5 (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 4.265 * math.sqrt(spread)) ** 3)


def assert_follows(tokens: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    """Assert by a chi-square test that ``tokens`` are drawn from the distribution ``expected``.

    The significance is about 1e-5. No token of probability zero may occur.
    """
    counts = np.bincount(tokens, minlength=len(expected)).astype(np.float64)
    impossible = np.flatnonzero(counts * (expected == 0))
    assert not len(impossible), f"drew tokens of probability zero: {impossible}"
    wanted = expected * len(tokens)
    common = wanted >= 5
    rest = counts[~common].sum()
    rest_wanted = wanted[~common].sum()
    statistic = float(np.sum((counts[common] - wanted[common]) ** 2 / wanted[common]))
    statistic += (rest - rest_wanted) ** 2 / max(rest_wanted, 1.0)
    freedom = max(int(common.sum()) - 1, 1) + 1
    limit = chi_square_limit(freedom)
    assert statistic < limit, (
        f"chi-square {statistic:.1f} exceeds {limit:.1f} with {freedom} degrees of freedom"
    )


class SamplerBase:
    """A sampler with its driver, logits and parameters, which all tests share."""

    device = "cpu"
    seed = 20

    def make(self) -> Sampler:
        """Return a new sampler, not yet reserved."""
        raise NotImplementedError

    def driver(self, vocab: int = VOCAB) -> Driver:
        return Driver(self.make(), vocab, self.device)

    def logits(self, rows: int = 1, vocab: int = VOCAB, scale: float = 2.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + rows)
        return torch.randn(rows, vocab, generator=generator) * scale

    def mixed_params(self) -> list[SamplingParams]:
        """Return parameters of all rows, with mixed features."""
        generator = np.random.default_rng(self.seed)

        def pick(*values: object) -> object:
            return values[int(generator.integers(len(values)))]

        return [
            make_params(
                seed=row,
                temperature=pick(0.0, 0.6, 1.0, 1.8),
                top_k=pick(0, 0, 4, 20),
                top_p=pick(1.0, 1.0, 0.7, 0.95),
                min_p=pick(0.0, 0.0, 0.05),
                presence_penalty=pick(0.0, 0.0, 1.0),
                frequency_penalty=pick(0.0, 0.0, 0.7),
                repetition_penalty=pick(1.0, 1.0, 1.4),
                logit_bias=pick(None, None, {3: 4.0, 9: -100.0}),
                allowed_token_ids=pick(None, None, [1, 3, 5, 7, 11, 30]),
                min_tokens=pick(0, 0, 9),
                logprobs=pick(None, None, 3),
            )
            for row in range(ROWS)
        ]
