"""Conformance suite of the ``sampling`` slot. Subclass SamplerSuite and define ``make``.

Distributions are checked by a chi-square test with fixed seeds, so that runs are repeatable; all
other results are checked against the naive formulas in ``parts/sampler_base``.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from glowplug.core.protocols import Sampled
from glowplug.core.testing.suites.parts.sampler_base import (
    DRAWS as DRAWS,
    ROWS as ROWS,
    VOCAB as VOCAB,
    Driver as Driver,
    assert_follows as assert_follows,
    decode_batch as decode_batch,
    make_params as make_params,
    naive_distribution as naive_distribution,
    naive_logits as naive_logits,
)
from glowplug.core.testing.suites.parts.sampler_edits import SamplerEditsSuite


class SamplerSuite(SamplerEditsSuite):
    """Tests of ``protocols.Sampler``."""

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

    def test_independent_of_the_batch(self) -> None:
        params = self.mixed_params()
        logits = self.logits(ROWS)
        together = self.driver()
        single = self.driver()
        for row in range(ROWS):
            for driver in (together, single):
                driver.join(row, params[row], [1, 2, 3], [4, 4, row % VOCAB], [6])
        alone = [
            single.step([row], [6], logits[row : row + 1]).tokens.item() for row in range(ROWS)
        ]
        order = np.random.default_rng(1).permutation(ROWS).tolist()
        for rows in (list(range(ROWS)), order, order[: ROWS // 2]):
            drawn = together.step(rows, [6] * len(rows), logits[rows]).tokens.tolist()
            assert drawn == [alone[row] for row in rows]

    def test_independent_of_the_row(self) -> None:
        driver = self.driver()
        logits = self.logits()
        for row in (0, 17, ROWS - 1):
            driver.join(row, make_params(seed=3, top_p=0.9))
        drawn = [driver.many(row, logits, 100).tolist() for row in (0, 17, ROWS - 1)]
        assert drawn[0] == drawn[1] == drawn[2]

    def test_rows_and_positions_may_be_strided(self) -> None:
        """The tensors of rows and positions may have any stride.

        The stride may be 0: all drafts of a sequence share one row number.
        """
        driver = self.driver()
        params = make_params(temperature=1.5, top_p=0.9, presence_penalty=0.5)
        for row in range(6):
            driver.join(row, params.replace(seed=row), [1, 2], [row])
        own = torch.arange(6, device=driver.device)
        driver.sampler.plan_step(decode_batch(range(6), [4] * 6))
        self.check_strided(driver, own[3:4].expand(6), own)
        self.check_strided(driver, own.flip(0), own[4:5].expand(6))
        every_second = own.repeat_interleave(2)[::2]
        self.check_strided(driver, every_second, torch.stack([own, own + 9], 1)[:, 0])

    def check_strided(self, driver: Driver, rows: Tensor, positions: Tensor) -> None:
        """Check that strided arguments give the same draws as contiguous ones.

        Strided tokens are observed, too.
        """
        logits = self.logits(6)
        strided = driver.sample(rows, positions, logits)
        assert driver.sample(rows.clone(), positions.clone(), logits) == strided
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=driver.device)
        counts = torch.ones(1, dtype=torch.int32, device=driver.device)
        driver.sampler.observe(tokens.expand(6, 1), counts.expand(6), rows)

    # ---- reported values -------------------------------------------------------------------------

    def test_logprobs_are_of_the_raw_distribution(self) -> None:
        driver = self.driver()
        logits = self.logits(4)
        edits = {"logit_bias": {7: 20.0}, "repetition_penalty": 2.0}
        driver.join(0, make_params(logprobs=0))
        driver.join(1, make_params(logprobs=5, temperature=0.2, top_k=2, **edits))
        driver.join(2, make_params())
        driver.join(3, make_params(logprobs=2, temperature=0.0))
        sampled = driver.step(range(4), [2] * 4, logits)
        expected = logits.double().log_softmax(-1)
        assert sampled.logprobs is not None and sampled.logprobs.top.shape[1] >= 5
        for row, k in ((0, 0), (1, 5), (3, 2)):
            self.check_logprobs(sampled, row, expected[row], k)
        assert sampled.tokens[1] == 7

    @staticmethod
    def check_logprobs(sampled: Sampled, row: int, expected: Tensor, k: int) -> None:
        """Compare the log-probabilities of a row's token and k best tokens with ``expected``."""
        got = sampled.logprobs
        assert got is not None
        best = expected.topk(k)
        assert abs(got.token[row].item() - expected[sampled.tokens[row]].item()) < 1e-5
        assert got.top_ids[row, :k].tolist() == best.indices.tolist()
        assert torch.allclose(got.top[row, :k].double(), best.values, atol=1e-5)

    def test_a_bad_row_costs_only_itself(self) -> None:
        driver = self.driver()
        clean = self.driver()
        logits = self.logits(ROWS)
        for row in range(ROWS):
            top_p = 0.9 if row % 3 else 1.0
            params = make_params(seed=row, temperature=float(row % 2), top_p=top_p)
            driver.join(row, params)
            clean.join(row, params)
        bad = [3, 10, 11, 20]
        sampled = driver.step(range(ROWS), [2] * ROWS, self.broken(logits))
        wanted = clean.step(range(ROWS), [2] * ROWS, logits)
        assert torch.nonzero(sampled.bad).flatten().tolist() == bad
        assert ((sampled.tokens >= 0) & (sampled.tokens < VOCAB)).all()
        good = [row for row in range(ROWS) if row not in (*bad, 21)]
        assert sampled.tokens[good].tolist() == wanted.tokens[good].tolist()

    @staticmethod
    def broken(logits: Tensor) -> Tensor:
        """Return logits whose rows 3, 10, 11 and 20 are bad (see ``Sampled.bad``)."""
        broken = logits.clone()
        broken[3, 5] = math.nan
        broken[10] = -math.inf
        broken[11] = math.nan
        broken[20, 0] = math.inf
        broken[21, :5] = -math.inf  # not bad: other tokens are left
        return broken

    def test_an_empty_step(self) -> None:
        sampled = self.driver().step([], [], torch.zeros(0, VOCAB))
        assert sampled.tokens.shape == (0,) and sampled.bad.shape == (0,)
