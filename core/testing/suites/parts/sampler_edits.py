"""Conformance tests of the ``sampling`` slot: edits of logits by penalties, bias and limits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from glowplug.core.testing.suites.parts.sampler_base import (
    ROWS,
    VOCAB,
    Driver,
    SamplerBase,
    assert_follows,
    decode_batch,
    make_params,
    naive_distribution,
    naive_logits,
)


class SamplerEditsSuite(SamplerBase):
    """Tests of edited logits and of the tokens that penalties count."""

    def check_edits(self, **changes: object) -> None:
        """Check the distribution of drawn tokens, and the greedy ones, with ``changes``."""
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
        """Penalties count observed tokens exactly as they count output tokens given to ``join``."""
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
        """Penalties at a position count the drafts before it; later steps do not count them."""
        params = make_params(
            temperature=0.9,
            presence_penalty=0.9,
            frequency_penalty=0.6,
            repetition_penalty=1.2,
            min_tokens=4,
        )
        drafts = np.random.default_rng(3).integers(0, VOCAB, 3).tolist()
        logits = self.logits(4)
        at_once = self.driver()
        stepped = self.driver()
        for driver in (at_once, stepped):
            driver.join(5, params, [1, 2, 3], [4], [6])
            driver.join(6, make_params(temperature=0.0), [1, 2, 3], [4])
        at_once.sampler.plan_step(decode_batch([5, 6], [7, 7]))
        for _ in range(2):
            drawn = self.draw_ahead(at_once, drafts, logits)
        for i in range(4):
            assert stepped.step([5], [4 + i], logits[i : i + 1]).tokens.tolist() == [drawn[i]]
            if i < 3:
                stepped.observe([5], [drafts[i]])

    @staticmethod
    def draw_ahead(driver: Driver, drafts: list[int], logits: Tensor) -> list[int]:
        """Draw row 5's tokens at positions 4 to 7, which follow 0, 1, 2 and 3 of ``drafts``."""
        on = driver.device
        ahead = [[*drafts[:i], *[-1] * (3 - i)] for i in range(4)]
        return driver.sample(
            torch.tensor([5] * 4, device=on),
            torch.tensor([4, 5, 6, 7], device=on),
            logits,
            torch.tensor(ahead, device=on),
        )

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
