"""Speculation of width one, and the eager graph runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Limits, Sampled, Worker
from glowplug.core.step.batch import Batch, LogprobTensors
from glowplug.core.testing.suites.speculative import SpeculativeSuite
from glowplug.plugins.graphs.eager import EagerOptions, register_graph_runners
from glowplug.plugins.graphs.eager_runtime import Eager
from glowplug.plugins.speculative.none import NoSpeculationOptions, register_speculative_algorithms
from glowplug.plugins.speculative.none_runtime import NoSpeculation

PLAN: Any = SimpleNamespace(seed=0)
CONTEXT: Any = SimpleNamespace()  # not used: there is no draft to build
VOCAB = 11


class TestNoSpeculation(SpeculativeSuite):
    def make(self, limits: Limits) -> NoSpeculation:
        algorithm = NoSpeculation(NoSpeculationOptions(), PLAN, Worker())
        algorithm.reserve(limits)
        return algorithm


class Recorder:
    """A sampler that takes the argmax and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []
        self.seen: list[tuple[list[list[int]], list[int], list[int]]] = []

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
    ) -> Sampled:
        self.calls.append((rows.tolist(), positions.tolist()))
        best = logits.max(-1)
        logprobs = LogprobTensors(best.values, best.indices[:, None], best.values[:, None])
        return Sampled(best.indices, logits.isnan().any(-1), logprobs)

    def observe(self, tokens: Tensor, counts: Tensor, rows: Tensor) -> None:
        self.seen.append((tokens.tolist(), counts.tolist(), rows.tolist()))


def make() -> NoSpeculation:
    algorithm = NoSpeculation(NoSpeculationOptions(), PLAN, Worker())
    algorithm.reserve(Limits(rows=8, context=99, num_pages=9, width=1, vocab=VOCAB))
    return algorithm


def batch(rows: list[int], decodes: int, kv_lens: list[int], samples: list[bool]) -> Batch:
    count = len(rows)
    lens = np.asarray(kv_lens, np.int32)
    made = Batch(
        step=1,
        mode=Mode.DECODE,
        rows=np.asarray(rows, np.int32),
        epochs=np.zeros(count, np.int64),
        num_decodes=decodes,
        query_lens=np.ones(count, np.int32),
        kv_lens=lens,
        samples=np.asarray(samples, np.bool_),
        prompt_ids=np.zeros(0, np.int32),
        pages=np.zeros((count, 1), np.int32),
    )
    made.row_ids, made.kv_lens_device = torch.tensor(rows), torch.from_numpy(lens)
    return made


def logits(tokens: list[int]) -> Tensor:
    rows = torch.randn(len(tokens), VOCAB, generator=torch.Generator().manual_seed(len(tokens)))
    rows[torch.arange(len(tokens)), torch.tensor(tokens)] = 9.0
    return rows


def test_accepted_tokens_feed_the_next_draft() -> None:
    algorithm, sampler = make(), Recorder()
    hidden = torch.zeros(4, 2)
    first = batch([5, 2, 7], 0, [3, 4, 6], [True, True, True])
    accepted = algorithm.accept(logits([1, 2, 3]), hidden, first, sampler)  # type: ignore[arg-type]
    assert accepted.tokens.tolist() == [[1], [2], [3]] and accepted.counts.tolist() == [1, 1, 1]
    assert sampler.calls == [([5, 2, 7], [3, 4, 6])]
    following = batch([7, 5], 2, [7, 4], [True, True])
    assert algorithm.draft(following).tolist() == [[3], [1]]
    algorithm.accept(logits([8, 9]), hidden, following, sampler)  # type: ignore[arg-type]
    assert algorithm.draft(batch([5, 2, 7], 3, [5, 5, 8], [True] * 3)).tolist() == [[9], [2], [8]]
    assert sampler.seen[1] == ([[8], [9]], [1, 1], [7, 5])


def test_rows_that_do_not_sample_yield_nothing() -> None:
    algorithm, sampler = make(), Recorder()
    mixed = batch([4, 1, 6, 0], 1, [9, 4, 5, 6], [True, False, True, False])
    values = logits([3, 10])
    values[1, 0] = float("nan")
    values[1, 10] = float("nan")
    accepted = algorithm.accept(values, torch.zeros(4, 2), mixed, sampler)  # type: ignore[arg-type]
    assert sampler.calls == [([4, 6], [9, 5])]
    assert accepted.counts.tolist() == [1, 0, 1, 0] and accepted.counts.dtype == torch.int32
    assert accepted.bad.tolist() == [False, False, True, False]
    assert accepted.tokens.shape == (4, 1) and accepted.tokens[0, 0] == 3
    assert accepted.logprobs is not None and accepted.logprobs.top_ids.shape == (4, 1)
    assert accepted.logprobs.token[0] == 9.0
    assert sampler.seen[0][1] == [1, 0, 1, 0]
    assert algorithm.draft(batch([1, 0, 4], 3, [5, 7, 10], [True] * 3)).tolist() == [[0], [0], [3]]


def test_both_declare_one_token_without_drafts() -> None:
    (speculative,), (graphs,) = register_speculative_algorithms(), register_graph_runners()
    assert speculative.name == "none" and not speculative.offers.drafts
    assert make().width() == 1 and make().draft_model(CONTEXT, CONTEXT, CONTEXT) is None
    assert make().lengths(batch([0], 1, [1], [True])) is None
    assert graphs.name == "eager" and not graphs.offers.captures
    runner = Eager(EagerOptions(), PLAN, Worker())
    assert runner.shapes(PLAN) == [] and runner.graph_for(batch([0], 1, [1], [True])) is None
