"""Conformance suite of the ``sampling`` slot. Subclass SamplerSuite and define ``make``.

Distributions are checked by a chi-square test with fixed seeds, so that runs are repeatable; all
other results are checked against the naive formulas in this file.
"""

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
    """Return a step in which each row draws the token at its position."""
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
    """Edit by definition: allowed tokens, min_tokens, bias, repetition, frequency, presence."""
    edited = logits.copy()
    for token in range(len(edited)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            edited[token] = -math.inf
        if token in stops and len(output) < params.min_tokens:
            edited[token] = -math.inf
        edited[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            repetition = params.repetition_penalty
            edited[token] = (
                edited[token] / repetition if edited[token] > 0 else edited[token] * repetition
            )
        edited[token] -= list(output).count(token) * params.frequency_penalty
        edited[token] -= (token in output) * params.presence_penalty
    return edited


def naive_distribution(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """Apply temperature, then min-p, top-k and top-p, each to the tokens still left."""
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs[probs < params.min_p * probs.max()] = 0.0
    if params.top_k > 0:
        probs[np.argsort(-probs, kind="stable")[params.top_k :]] = 0.0
    order = np.argsort(-probs, kind="stable")
    share = np.cumsum(probs[order]) / probs.sum()
    if params.top_p < 1.0:
        probs[order[int(np.sum(share < params.top_p)) + 1 :]] = 0.0
    return np.asarray(probs / probs.sum())


def assert_follows(tokens: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    """Test by chi-square at a significance of about 1e-5; no token outside the support."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(np.float64)
    impossible = np.flatnonzero(counts * (expected == 0))
    assert not len(impossible), f"drew tokens of probability zero: {impossible}"
    wanted = expected * len(tokens)
    common = wanted >= 5
    rest = counts[~common].sum(), wanted[~common].sum()
    statistic = float(np.sum((counts[common] - wanted[common]) ** 2 / wanted[common]))
    statistic += (rest[0] - rest[1]) ** 2 / max(rest[1], 1.0)
    freedom = max(int(common.sum()) - 1, 1) + 1
    limit = (
        freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    )  # Wilson-Hilferty
    assert statistic < limit, (
        f"chi-square {statistic:.1f} exceeds {limit:.1f} with {freedom} degrees of freedom"
    )


class SamplerSuite:
    """Tests of ``protocols.Sampler``."""

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

    # ---- choosing --------------------------------------------------------------------------------

    def test_greedy_is_argmax(self) -> None:
        driver = self.driver()
        logits = self.logits(ROWS)
        for row in range(ROWS):
            driver.join(row, make_params(temperature=0.0, top_p=0.1, top_k=3))
        sampled = driver.step(range(ROWS), [2] * ROWS, logits)
        assert sampled.tokens.tolist() == logits.argmax(-1).tolist()
        assert not sampled.bad.any() and sampled.logprobs is None

    def check_distribution(self, **changes: object) -> None:
        driver = self.driver()
        logits = self.logits()
        params = make_params(**changes)
        driver.join(0, params)
        assert_follows(
            driver.many(0, logits), naive_distribution(logits[0].double().numpy(), params)
        )

    def test_temperature(self) -> None:
        for temperature in (0.3, 1.0, 2.5):
            self.check_distribution(temperature=temperature)

    def test_top_k(self) -> None:
        for top_k in (1, 5, VOCAB - 1, VOCAB, 10_000, -1):
            self.check_distribution(top_k=top_k)

    def test_top_p(self) -> None:
        for top_p in (0.01, 0.5, 0.9, 0.999):
            self.check_distribution(top_p=top_p)

    def test_min_p(self) -> None:
        for min_p in (0.02, 0.3, 1.0):
            self.check_distribution(min_p=min_p, temperature=1.3)

    def test_all_cuts_together(self) -> None:
        self.check_distribution(temperature=1.7, min_p=0.01, top_k=12, top_p=0.8)

    # ---- randomness ------------------------------------------------------------------------------

    def test_seed_and_position_decide(self) -> None:
        driver = self.driver()
        logits = self.logits()
        draws = {}
        for row, seed in enumerate((0, 1, -1, -(1 << 63), (1 << 64) - 2, 12345)):
            driver.join(row, make_params(seed=seed))
            draws[seed] = driver.many(row, logits, 200)
            assert np.array_equal(draws[seed], driver.many(row, logits, 200)), (
                "the same seed gave other tokens"
            )
        distinct = {tuple(tokens.tolist()) for tokens in draws.values()}
        assert len(distinct) == len(draws), "different seeds gave the same tokens"

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

    def test_independent_of_the_batch(self) -> None:
        params = self.mixed_params()
        logits = self.logits(ROWS)
        together = self.driver()
        apart = self.driver()
        for row in range(ROWS):
            together.join(row, params[row], [1, 2, 3], [4, 4, row % VOCAB], [6])
            apart.join(row, params[row], [1, 2, 3], [4, 4, row % VOCAB], [6])
        alone = [apart.step([row], [6], logits[row : row + 1]).tokens.item() for row in range(ROWS)]
        assert together.step(range(ROWS), [6] * ROWS, logits).tokens.tolist() == alone
        order = np.random.default_rng(1).permutation(ROWS).tolist()
        assert together.step(order, [6] * ROWS, logits[order]).tokens.tolist() == [
            alone[row] for row in order
        ]
        half = order[: ROWS // 2]
        assert together.step(half, [6] * len(half), logits[half]).tokens.tolist() == [
            alone[row] for row in half
        ]

    def test_independent_of_the_row(self) -> None:
        driver = self.driver()
        logits = self.logits()
        for row in (0, 17, ROWS - 1):
            driver.join(row, make_params(seed=3, top_p=0.9))
        drawn = [driver.many(row, logits, 100).tolist() for row in (0, 17, ROWS - 1)]
        assert drawn[0] == drawn[1] == drawn[2]

    def test_rows_and_positions_may_be_strided(self) -> None:
        """Strides may be 0: one sequence's drafts all have the same row."""
        driver = self.driver()
        logits = self.logits(6)
        for row in range(6):
            driver.join(
                row,
                make_params(seed=row, temperature=1.5, top_p=0.9, presence_penalty=0.5),
                [1, 2],
                [row],
            )
        own = torch.arange(6, device=driver.device)
        driver.sampler.plan_step(decode_batch(range(6), [4] * 6))
        for rows, positions in (
            (own[3:4].expand(6), own),
            (own.flip(0), own[4:5].expand(6)),
            (own.repeat_interleave(2)[::2], torch.stack([own, own + 9], 1)[:, 0]),
        ):
            drawn = [
                driver.sampler.sample(logits.clone().to(own.device), *given).tokens.tolist()
                for given in ((rows, positions), (rows.clone(), positions.clone()))
            ]
            assert drawn[0] == drawn[1]
            counts = torch.ones(6, dtype=torch.int32, device=own.device)
            driver.sampler.observe(own[:1].expand(6)[:, None], counts[:1].expand(6), rows)

    # ---- edits -----------------------------------------------------------------------------------

    def check_edits(self, **changes: object) -> None:
        """Check draws from edited logits: their distribution, and greedy's choice."""
        prompt = [1, 2, 2]
        output = [4, 4, 8]
        driver = self.driver()
        params = make_params(**changes)
        driver.join(0, params, prompt, output)
        logits = self.logits()
        edited = naive_logits(logits[0].double().numpy(), params, prompt, output, ())
        assert_follows(driver.many(0, logits), naive_distribution(edited, params))
        greedy = params.replace(temperature=0.0)
        rows = list(range(ROWS))
        for row in rows:
            driver.join(row, greedy, prompt, [row % VOCAB, 4])
        logits = self.logits(ROWS, scale=0.5)
        wanted = [
            naive_logits(logits[row].double().numpy(), greedy, prompt, [row % VOCAB, 4], ())
            for row in rows
        ]
        tokens = driver.step(rows, [5] * ROWS, logits).tokens.tolist()
        assert tokens == [int(row.argmax()) for row in wanted]

    def test_repetition_penalty(self) -> None:
        for repetition in (0.5, 1.3, 3.0):
            self.check_edits(repetition_penalty=repetition)

    def test_frequency_and_presence_penalty(self) -> None:
        self.check_edits(frequency_penalty=0.8)
        self.check_edits(presence_penalty=-1.5)
        self.check_edits(frequency_penalty=-0.4, presence_penalty=1.1, repetition_penalty=1.2)

    def test_logit_bias(self) -> None:
        self.check_edits(logit_bias={0: 3.0, 5: -100.0, VOCAB - 1: 1.5})
        self.check_edits(logit_bias={4: 2.0}, repetition_penalty=1.7, top_k=9)

    def test_allowed_token_ids(self) -> None:
        self.check_edits(allowed_token_ids=[0, 4, 8, VOCAB - 1])
        self.check_edits(allowed_token_ids=[13], top_p=0.5)

    def test_min_tokens(self) -> None:
        driver = self.driver()
        logits = torch.zeros(1, VOCAB)
        logits[0, 6], logits[0, 9] = 50.0, 40.0
        driver.join(0, make_params(temperature=0.0, min_tokens=3), [1, 2], [], [6])
        driver.join(1, make_params(min_tokens=3), [1, 2], [], [6])
        for position, token in ((2, 9), (3, 9), (4, 9), (5, 6), (6, 6)):
            assert driver.step([0], [position], logits).tokens.tolist() == [token]
            assert (
                driver.step([1, 0], [position] * 2, logits.expand(2, -1)).tokens.tolist()
                == [token] * 2
            )

    def test_observed_tokens_count_like_joined_ones(self) -> None:
        """Penalties count tokens observed one by one like those joined with (preemption)."""
        stepped = self.driver()
        joined = self.driver()
        logits = self.logits(3)
        params = [
            make_params(seed=row, frequency_penalty=0.5, repetition_penalty=1.3) for row in range(2)
        ]
        params.append(make_params(seed=2))
        for row in range(3):
            stepped.join(row, params[row], [1, 2])
        outputs: list[list[int]] = [[], [], []]
        for position in range(2, 30):
            drawn = stepped.step(range(3), [position] * 3, logits).tokens.tolist()
            for row in range(3):
                joined.join(row, params[row], [1, 2], outputs[row])
            assert joined.step(range(3), [position] * 3, logits).tokens.tolist() == drawn
            stepped.observe(range(3), drawn)
            for row in range(3):
                outputs[row].append(drawn[row])

    def test_tokens_ahead_count_like_observed_ones(self) -> None:
        """Drafts before a position are counted there only, and not stored."""
        rng = np.random.default_rng(3)
        params = make_params(
            temperature=0.9,
            presence_penalty=0.9,
            frequency_penalty=0.6,
            repetition_penalty=1.2,
            min_tokens=4,
        )
        drafts = rng.integers(0, VOCAB, 3).tolist()
        logits = self.logits(4)
        at_once = self.driver()
        stepped = self.driver()
        for driver in (at_once, stepped):
            driver.join(5, params, [1, 2, 3], [4], [6])
            driver.join(6, make_params(temperature=0.0), [1, 2, 3], [4])
        rows = [5, 5, 5, 5]
        positions = [4, 5, 6, 7]
        ahead = torch.tensor(
            [[*drafts[:i], *[-1] * (3 - i)] for i in range(4)], device=at_once.device
        )
        at_once.sampler.plan_step(decode_batch([5, 6], [7, 7]))
        for _ in range(2):
            drawn = at_once.sampler.sample(
                logits.clone().to(at_once.device),
                torch.tensor(rows, device=ahead.device),
                torch.tensor(positions, device=ahead.device),
                ahead,
            ).tokens.tolist()
        for i in range(4):
            assert stepped.step([5], [positions[i]], logits[i : i + 1]).tokens.tolist() == [
                drawn[i]
            ]
            if i < 3:
                stepped.observe([5], [drafts[i]])

    def test_rows_start_afresh(self) -> None:
        driver = self.driver()
        fresh = self.driver()
        logits = self.logits()
        for used in self.mixed_params()[:10]:
            driver.join(0, used, [1, 2, 3], [4, 5], [6])
            driver.step([0], [5], logits)
            driver.sampler.leave(0)
        params = make_params(frequency_penalty=0.1, logit_bias={1: 0.5})
        for each in (driver, fresh):
            each.join(0, params)
        assert driver.many(0, logits, 200).tolist() == fresh.many(0, logits, 200).tolist()

    # ---- reported values -------------------------------------------------------------------------

    def test_logprobs_are_of_the_raw_distribution(self) -> None:
        driver = self.driver()
        logits = self.logits(4)
        driver.join(0, make_params(logprobs=0))
        driver.join(
            1,
            make_params(
                logprobs=5, temperature=0.2, top_k=2, logit_bias={7: 20.0}, repetition_penalty=2.0
            ),
        )
        driver.join(2, make_params())
        driver.join(3, make_params(logprobs=2, temperature=0.0))
        sampled = driver.step(range(4), [2] * 4, logits)
        expected = logits.double().log_softmax(-1)
        got = sampled.logprobs
        assert got is not None and got.top.shape[1] >= 5
        for row, k in ((0, 0), (1, 5), (3, 2)):
            token = int(sampled.tokens[row])
            assert abs(got.token[row].item() - expected[row, token].item()) < 1e-5
            best = expected[row].topk(k)
            assert got.top_ids[row, :k].tolist() == best.indices.tolist()
            assert torch.allclose(got.top[row, :k].double(), best.values, atol=1e-5)
        assert sampled.tokens[1] == 7

    def test_a_bad_row_costs_only_itself(self) -> None:
        driver = self.driver()
        clean = self.driver()
        logits = self.logits(ROWS)
        for row in range(ROWS):
            for each in (driver, clean):
                each.join(
                    row,
                    make_params(
                        seed=row, temperature=float(row % 2), top_p=0.9 if row % 3 else 1.0
                    ),
                )
        broken = logits.clone()
        broken[3, 5], broken[10], broken[11], broken[20, 0] = (
            math.nan,
            -math.inf,
            math.nan,
            math.inf,
        )
        broken[21, :5] = -math.inf  # not bad: other tokens are left
        sampled = driver.step(range(ROWS), [2] * ROWS, broken)
        wanted = clean.step(range(ROWS), [2] * ROWS, logits)
        assert torch.nonzero(sampled.bad).flatten().tolist() == [3, 10, 11, 20]
        assert ((sampled.tokens >= 0) & (sampled.tokens < VOCAB)).all()
        good = [row for row in range(ROWS) if row not in (3, 10, 11, 20, 21)]
        assert sampled.tokens[good].tolist() == wanted.tokens[good].tolist()

    def test_an_empty_step(self) -> None:
        sampled = self.driver().step([], [], torch.zeros(0, VOCAB))
        assert sampled.tokens.shape == (0,) and sampled.bad.shape == (0,)
